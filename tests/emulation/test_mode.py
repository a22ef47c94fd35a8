"""FP16 emulation against torch's own half precision, and against FP32 rounded once."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: F401 - the table calls it
from support import wrapped
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpdiag
from mpdiag.emulation import policy
from mpdiag.emulation.mode import _EXACT_NATIVELY, Emulation, unwatched
from mpdiag.tracing.precision import HALF

generator = torch.Generator()


def numbers(*shape: int) -> torch.Tensor:
    """Normal values over many magnitudes, rounded to FP16, as FP32."""
    scale = torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * scale).half().float()


def positive(*shape: int) -> torch.Tensor:
    return (numbers(*shape).abs() + 0.125).half().float()


index = torch.tensor([0, 2, 1, 2, 0, 1, 1, 2])

TABLE = Path(__file__).with_name("rounded_operations.tsv").read_text().splitlines()
ROWS = [row.split("\t") for row in TABLE[1:]]
OPERATIONS = {
    name: (eval(f"lambda {arguments}: {call}"), eval(inputs))
    for name, arguments, call, inputs, _ in ROWS
}
"""An ATen operation or a few, by name: the function and its inputs."""
ROUNDING = {name: words.split() for name, *_, words in ROWS}
"""By name: ``accumulates``: where the order decides, results may differ by a unit in the last place of the
largest term, not of the (cancelled) result: torch's own kernels differ so among themselves. ``inside``:
torch's CPU kernels round a factor or an intermediate to half precision, as its CUDA kernels do not: near a
zero of the result that is many units; FP32 is the oracle of these. ``composite``: rounds between its parts.
``reads``: the backward pass reads the stored, rounded result, and magnifies its rounding: half a unit there
is eleven units in a gradient near zero. Kernels that differ in the result's last place (torch's do from one
instruction set to the next) differ by more in the gradients; no farther from the truth is the bound."""


def run(name: str, dtype: torch.dtype, emulated: bool) -> list[torch.Tensor]:
    """The result and all gradients of an operation on inputs of this dtype."""
    function, inputs = OPERATIONS[name]
    leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    with Emulation() if emulated else nullcontext():
        result = function(*leaves)
        own = torch.Generator().manual_seed(1)
        weights = torch.randn(result.shape, generator=own).half().float()
        gradients = torch.autograd.grad(result, leaves, weights.to(result.dtype))
    return [result.detach(), *gradients]


def units_apart(a: torch.Tensor, b: torch.Tensor, *, by_largest: bool) -> float:
    """Largest distance in units in the last place, of each value or of the largest one."""
    a, b = a.detach().double(), b.detach().double()
    size = torch.maximum(a.abs(), b.abs())
    if by_largest:
        size = size.max().expand_as(size)
    unit = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-14))) - 10)
    return float(((a - b).abs() / unit).max()) if a.numel() else 0.0


def farther(a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor) -> float:
    """By how many units ``a`` lies farther from the truth than ``b`` does."""
    ours, theirs = (units_apart(x, truth, by_largest=True) for x in (a, b))
    return max(0.0, ours - theirs)


@pytest.mark.filterwarnings("ignore:.*lerp:UserWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_and_backward_are_within_a_unit_of_torchs_half_precision(name):
    ours = run(name, torch.float16, emulated=True)
    assert all(t.dtype == torch.float16 for t in ours)
    try:
        theirs = run(name, torch.float16, emulated=False)
    except RuntimeError as error:
        if "not implemented for 'Half'" not in str(error):
            raise
        pytest.skip(f"torch has no half-precision {name} on a CPU")
    exact = run(name, torch.float64, emulated=False)
    for i, (a, b, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        by_largest = i > 0 or not {"accumulates", "inside"}.isdisjoint(ROUNDING[name])
        apart = units_apart(a, b, by_largest=by_largest)
        if "reads" in ROUNDING[name] and i > 0:
            apart = min(apart, farther(a, b, truth))
        assert apart <= 1.0, (name, i)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_forward_operation_is_fp32_rounded_once(name):
    """Exactly: the same FP32 arithmetic, then ``.half()``; composites round between their parts."""
    ours = run(name, torch.float16, emulated=True)[0]
    exact = run(name, torch.float32, emulated=False)[0].half()
    apart = units_apart(ours, exact, by_largest=True)
    assert apart <= (0.0 if {"accumulates", "composite"}.isdisjoint(ROUNDING[name]) else 1.0)


class Names(TorchDispatchMode):
    """The operations that reach the level below autograd."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, result))
        return result


def cast(args, dtype):
    """Arguments with their floating-point tensors in a dtype."""
    return [x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in args]


def test_no_operation_is_left_native_that_rounds_twice():
    """Each name in the list of natively exact operations that computes is compared bit by bit."""
    computing = {"abs", "clamp", "div", "leaky_relu", "maximum", "minimum", "mul", "neg", "relu",
                 "sigmoid", "silu", "tanh", "masked_fill"}  # fmt: skip
    assert computing <= _EXACT_NATIVELY
    a, b = numbers(4096), positive(4096)
    for name in computing:
        op = getattr(torch.ops.aten, name)
        args = {
            "clamp": (a, -0.3, 0.3), "div": (a, b), "leaky_relu": (a, 0.1), "maximum": (a, b),
            "minimum": (a, b), "mul": (a, b), "masked_fill": (a, a > 0, 3.0),
        }.get(name, (a,))  # fmt: skip
        for dtype in HALF:
            low = cast(args, dtype)
            wide = cast(low, torch.float32)
            assert torch.equal(op(*low), op(*wide).to(dtype)), (name, dtype)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_every_gate_and_state_of_an_lstm_is_rounded_at_each_time_step(steps):
    """oneDNN's LSTM is one opaque operation; here each step stores and rounds its tensors."""
    policy.install("cpu")
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4)
    names = Names()
    half = policy.Policy(torch.float16)
    apart = torch.backends.cudnn.flags(enabled=False)  # into its operations, as on a GPU
    with torch.autocast("cpu", half.dtype), policy.in_force(half), Emulation(), names, apart:
        lstm(torch.randn(steps, 2, 4))
    stored = [n for n, out in names.seen if isinstance(out, torch.Tensor) and out.dtype in HALF]
    assert "mkldnn_rnn_layer" not in [n for n, _ in names.seen]
    assert stored.count("sigmoid_") == 3 * steps  # input, forget and output gate
    assert stored.count("tanh_") == steps  # the candidate
    assert stored.count("tanh") == steps  # of the cell state
    assert stored.count("mul") == 3 * steps


def test_an_lstm_is_like_one_written_by_hand():
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8)
    x = torch.randn(6, 3, 8)
    policy.install("cpu")
    half = policy.Policy(torch.float16)
    with torch.autocast("cpu", half.dtype), policy.in_force(half), Emulation():
        ours, _ = lstm(x)

    def rounded(t):
        return t.half().float()

    w_x, w_h, b_x, b_h = (rounded(p.detach()) for p in lstm.parameters())
    h, c = torch.zeros(3, 8), torch.zeros(3, 8)
    for t in range(6):
        gates = rounded(rounded(rounded(x[t]) @ w_x.T + b_x) + rounded(h @ w_h.T + b_h))
        i, f, g, o = gates.chunk(4, 1)
        i, f, o = (rounded(gate.sigmoid()) for gate in (i, f, o))
        c = rounded(rounded(f * c) + rounded(i * rounded(g.tanh())))
        h = rounded(o * rounded(c.tanh()))
        assert units_apart(ours[t], h, by_largest=True) <= 1.0


def test_mixed_dtypes_are_refused_as_torch_refuses_them():
    with Emulation(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 2).half(), torch.ones(2, 2))


def test_in_place_operations_write_where_they_should():
    x = torch.full((4,), 0.1).half()
    with Emulation():
        y = x.addcmul_(x, x, value=0.5)
        z = x.add_(1e-4)
    assert y is x
    assert z is x
    expected = torch.full((4,), 0.1).half().float()
    expected = (expected + 0.5 * expected * expected).half()
    assert torch.equal(x, (expected.float() + 1e-4).half())


def test_onednn_is_as_it_was_afterwards_even_after_an_error():
    before = torch._C._get_mkldnn_enabled()
    with pytest.raises(ValueError, match="x"), Emulation():
        raise ValueError("x")
    assert torch._C._get_mkldnn_enabled() == before
    with Emulation(), unwatched():
        assert torch._C._get_mkldnn_enabled() == before


def test_bf16_is_emulated_alike():
    a, b = numbers(16, 32).bfloat16(), numbers(32, 8).bfloat16()
    with Emulation():
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())


SIZE = 32


def scattered() -> torch.Tensor:
    index_ = torch.randint(0, SIZE, (2, 100), generator=generator)
    size = (SIZE, SIZE)
    return torch.sparse_coo_tensor(index_, numbers(100), size, check_invariants=True).coalesce()


LAYOUTS = {
    "coo": scattered,
    "uncoalesced": lambda: torch.cat([scattered(), scattered()]),
    "csr": lambda: scattered().to_sparse_csr(),
    "csc": lambda: scattered().to_sparse_csc(),
    "bsr": lambda: scattered().to_dense().to_sparse_bsr((16, 16)),
    "nested": lambda: torch.nested.nested_tensor([numbers(9, SIZE), numbers(6, SIZE)]),
    "meta": lambda: torch.empty(SIZE, SIZE, device="meta"),
    "empty": lambda: torch.empty(0, SIZE),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("dtype", sorted(HALF, key=str))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_layout_are_computed_with(layout, dtype):
    x = LAYOUTS[layout]().to(dtype)
    functions = [torch.sin, torch.clone]
    if layout != "nested":
        functions += [lambda t: t @ torch.eye(SIZE, 3, dtype=t.dtype, device=t.device), torch.sum]
    with Emulation():
        results = [function(x) for function in functions]
    for function, result in zip(functions, results, strict=True):
        assert result.dtype == dtype
        if layout in ("coo", "uncoalesced", "csr", "csc", "bsr"):
            expected = _dense(function(x.to_dense().float())).to(dtype)
            assert torch.allclose(_dense(result), expected, rtol=1e-2, atol=1e-2)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.layout == torch.strided else x.to_dense()


def test_sparse_tensors_are_added_though_torch_has_no_half_kernel_for_it():
    x = scattered().half()
    with Emulation():
        total = x + x
    assert torch.equal(total.to_dense(), (x.to_dense() * 2))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_graph_network_trains(layout):
    adjacency = LAYOUTS[layout]()
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    mp = wrapped(model, mpdiag.PrecisionPlan(), backend="emulated")
    x = torch.randn(SIZE, 8)
    for _ in range(3):
        with mp.autocast():
            loss = (adjacency @ model(x)).square().mean()
        assert not mp.step(loss).skipped
    mp.close()


@pytest.mark.parametrize("dtype", sorted(HALF, key=str))
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_in_half_precision_move_as_fp32_ones_rounded(dtype, momentum):
    """Batch normalisation writes to them, though its schema does not say so."""
    low = torch.nn.BatchNorm2d(4, momentum=momentum).to(dtype)
    wide = torch.nn.BatchNorm2d(4, momentum=momentum)
    for _ in range(3):
        x = (3 * torch.randn(8, 4, 5, 5) + 5).to(dtype)
        with Emulation():
            y = low(x.requires_grad_())
            y.float().square().sum().backward()
        assert y.dtype == dtype
        wide(x.detach().float())
        for name in ("running_mean", "running_var"):
            statistic = getattr(wide, name)
            statistic.copy_(statistic.to(dtype))
            assert torch.equal(getattr(low, name).float(), statistic)
    assert low.running_mean.min() > 0


def test_running_statistics_of_an_instance_norm_move():
    low = torch.nn.InstanceNorm1d(8, track_running_stats=True).half()
    for _ in range(3):
        with Emulation():
            low(torch.full((2, 8, 2), 4.0).half())
    assert torch.all((low.running_mean.float() - 4 * (1 - 0.9**3)).abs() < 0.01)


def test_what_an_operation_returns_beside_what_it_writes_to_is_rounded():
    mean, variance = torch.zeros(4).half(), torch.ones(4).half()
    x, noise = torch.randn(8, 4).half(), torch.zeros(8, 4).half()
    with Emulation():
        legit = torch.ops.aten._native_batch_norm_legit
        normal = legit(x, None, None, mean, variance, True, 0.1, 1e-5)[0]
        leaky = torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    assert normal.dtype == leaky.dtype == torch.float16
    assert mean.any()
    assert noise.all()
