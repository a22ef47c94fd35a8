"""FP16 emulation against torch's own half precision, and against FP32 rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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

# name -> (function, inputs, absolute slack in units in the last place of 1.0): an ATen operation or
# a few. Sums are the only operations with slack: the order of their additions is not prescribed.
OPERATIONS = {
    "add": (lambda a, b: a + b, [numbers(64, 8), numbers(64, 8)]),
    "add with alpha": (lambda a, b: torch.add(a, b, alpha=0.3), [numbers(64, 8), numbers(64, 8)]),
    "add a number": (lambda a: a + 0.1, [numbers(64, 8)]),
    "sub": (lambda a, b: a - b, [numbers(64, 8), numbers(64, 8)]),
    "rsub": (lambda a: 1 - a, [numbers(64, 8)]),
    "mul": (lambda a, b: a * b, [numbers(64, 8), numbers(64, 8)]),
    "mul broadcast": (lambda a, b: a * b, [numbers(64, 8), numbers(8)]),
    "mul by a number": (lambda a: a * 0.1, [numbers(64, 8)]),
    "div": (lambda a, b: a / b, [numbers(64, 8), positive(64, 8)]),
    "div by a number": (lambda a: a / 3, [numbers(64, 8)]),
    "neg": (lambda a: -a, [numbers(64, 8)]),
    "abs": (lambda a: a.abs(), [numbers(64, 8)]),
    "pow": (lambda a: a**2, [numbers(64, 8)]),
    "pow 1.5": (lambda a: a**1.5, [positive(64, 8)]),
    "sqrt": (lambda a: a.sqrt(), [positive(64, 8)]),
    "rsqrt": (lambda a: a.rsqrt(), [positive(64, 8)]),
    "reciprocal": (lambda a: a.reciprocal(), [positive(64, 8)]),
    "exp": (lambda a: a.exp(), [numbers(64, 8)]),
    "expm1": (lambda a: a.expm1(), [numbers(64, 8)]),
    "log": (lambda a: a.log(), [positive(64, 8)]),
    "log1p": (lambda a: a.log1p(), [positive(64, 8)]),
    "sin": (lambda a: a.sin(), [numbers(64, 8)]),
    "cos": (lambda a: a.cos(), [numbers(64, 8)]),
    "tanh": (lambda a: a.tanh(), [numbers(64, 8)]),
    "atan2": (lambda a, b: torch.atan2(a, b), [numbers(64, 8), positive(64, 8)]),
    "sigmoid": (lambda a: a.sigmoid(), [numbers(64, 8)]),
    "erf": (lambda a: a.erf(), [numbers(64, 8)]),
    "relu": (lambda a: a.relu(), [numbers(64, 8)]),
    "leaky_relu": (lambda a: F.leaky_relu(a, 0.1), [numbers(64, 8)]),
    "elu": (lambda a: F.elu(a), [numbers(64, 8)]),
    "silu": (lambda a: F.silu(a), [numbers(64, 8)]),
    "gelu": (lambda a: F.gelu(a), [numbers(64, 8)]),
    "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), [numbers(64, 8)]),
    "mish": (lambda a: F.mish(a), [numbers(64, 8)]),
    "softplus": (lambda a: F.softplus(a), [numbers(64, 8)]),
    "hardtanh": (lambda a: F.hardtanh(a), [numbers(64, 8)]),
    "hardswish": (lambda a: F.hardswish(a), [numbers(64, 8)]),
    "logsigmoid": (lambda a: F.logsigmoid(a), [numbers(64, 8)]),
    "clamp": (lambda a: a.clamp(-0.3, 0.3), [numbers(64, 8)]),
    "maximum": (lambda a, b: torch.maximum(a, b), [numbers(64, 8), numbers(64, 8)]),
    "where": (lambda a, b: torch.where(b > 0, a, b), [numbers(64, 8), numbers(64, 8)]),
    "masked_fill": (lambda a: a.masked_fill(a > 0.5, -1e4), [numbers(64, 8)]),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), [numbers(64, 8), numbers(64, 8)]),
    "addcmul": (lambda a, b: torch.addcmul(a, b, b, value=0.3), [numbers(64, 8), numbers(64, 8)]),
    "addcdiv": (lambda a, b: torch.addcdiv(a, a, b, value=0.3), [numbers(64, 8), positive(64, 8)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [numbers(64, 8), numbers(64, 8)]),
    "stack": (lambda a, b: torch.stack([a, b]), [numbers(64, 8), numbers(64, 8)]),
    "gather": (lambda a: a.gather(0, index.expand(4, 8)), [numbers(4, 8)]),
    "index_select": (lambda a: a.index_select(0, index), [numbers(4, 8)]),
    "embedding": (lambda w: F.embedding(index, w), [numbers(4, 8)]),
    "roll": (lambda a: a.roll(3, 0), [numbers(64, 8)]),
    "pad": (lambda a: F.pad(a, (1, 2)), [numbers(64, 8)]),
    "sum": (lambda a: a.sum(), [numbers(64, 8)]),
    "sum over rows": (lambda a: a.sum(0), [numbers(64, 8)]),
    "mean": (lambda a: a.mean(1), [numbers(64, 8)]),
    "amax": (lambda a: a.amax(1), [numbers(64, 8)]),
    "var": (lambda a: a.var(1), [numbers(64, 8)]),
    "cumsum": (lambda a: a.cumsum(1), [numbers(64, 8)]),
    "norm": (lambda a: a.norm(dim=1), [numbers(64, 8)]),
    "logsumexp": (lambda a: a.logsumexp(1), [numbers(64, 8)]),
    "softmax": (lambda a: a.softmax(1), [numbers(64, 8)]),
    "log_softmax": (lambda a: F.log_softmax(a, 1), [numbers(64, 8)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (8,), w, b), [numbers(64, 8), numbers(8), numbers(8)]),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), [numbers(4, 8, 3, 3), numbers(8), numbers(8)]),
    "mm": (lambda a, b: a @ b, [numbers(16, 32), numbers(32, 8)]),
    "bmm": (lambda a, b: torch.bmm(a, b), [numbers(2, 16, 32), numbers(2, 32, 8)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [numbers(8), numbers(16, 32), numbers(32, 8)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [numbers(2, 16, 8), numbers(2, 16, 32), numbers(2, 32, 8)]),
    "mv": (lambda a, b: a @ b, [numbers(16, 32), numbers(32)]),
    "dot": (lambda a, b: torch.dot(a, b), [numbers(32), numbers(32)]),
    "linear": (lambda x, w, b: F.linear(x, w, b), [numbers(16, 32), numbers(8, 32), numbers(8)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [numbers(2, 4, 8), numbers(2, 4, 8)]),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [numbers(2, 4, 16), numbers(8, 4, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 1, 1), [numbers(2, 4, 8, 8), numbers(8, 4, 3, 3), numbers(8)]),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=4), [numbers(2, 4, 8, 8), numbers(4, 1, 3, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [numbers(2, 4, 4, 4), numbers(4, 3, 3, 3)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [numbers(2, 4, 8, 8)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [numbers(2, 4, 8, 8)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), [numbers(2, 4, 8, 8)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [numbers(2, 4, 8, 8)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [numbers(1, 2, 8, 8)] * 3),
    "mse_loss": (lambda a, b: F.mse_loss(a, b), [numbers(64, 8), numbers(64, 8)]),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b), [numbers(64, 8), numbers(64, 8)]),
    "cross_entropy": (lambda a: F.cross_entropy(a, index), [numbers(8, 8)]),
}  # fmt: skip

# Where an accumulation's order decides, results may differ by a unit in the last place of the
# largest term, not of the (cancelled) result: torch's own kernels differ so among themselves.
ACCUMULATES = {
    "sum", "sum over rows", "mean", "var", "cumsum", "norm", "logsumexp", "softmax", "log_softmax",
    "layer_norm", "group_norm", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear", "einsum",
    "conv1d", "conv2d", "conv2d depthwise", "conv_transpose2d", "avg_pool2d", "adaptive_avg_pool2d",
    "interpolate", "attention", "mse_loss", "smooth_l1_loss", "cross_entropy", "embedding",
    "index_select", "gather", "mul broadcast",
}  # fmt: skip

# torch's CPU kernels of these round a factor or an intermediate to half precision, as its CUDA kernels
# do not: near a zero of the result that is many units. The test below has FP32 for their oracle.
ROUNDS_INSIDE = {"add with alpha", "add a number", "gelu"}

# The backward pass reads the stored, rounded result, and magnifies its rounding: half a unit there is
# eleven units in a gradient near zero. Kernels that differ in the result's last place (torch's do from
# one instruction set to the next) differ by more in the gradients; no farther from the truth is the bound.
READS_ITS_RESULT = {"attention"}


def run(name: str, dtype: torch.dtype, emulated: bool) -> list[torch.Tensor]:
    """The result and all gradients of an operation on inputs of this dtype."""
    function, inputs = OPERATIONS[name]
    leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    mode = Emulation() if emulated else None
    if mode is not None:
        mode.__enter__()
    try:
        result = function(*leaves)
        weights = numbers_like(result)
        gradients = torch.autograd.grad(result, leaves, weights.to(result.dtype))
    finally:
        if mode is not None:
            mode.__exit__(None, None, None)
    return [result.detach(), *gradients]


def numbers_like(result: torch.Tensor) -> torch.Tensor:
    own = torch.Generator().manual_seed(1)
    return torch.randn(result.shape, generator=own).half().float()


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
        by_largest = name in ACCUMULATES | ROUNDS_INSIDE or i > 0
        apart = units_apart(a, b, by_largest=by_largest)
        if name in READS_ITS_RESULT and i > 0:
            apart = min(apart, farther(a, b, truth))
        assert apart <= 1.0, (name, i)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_forward_operation_is_fp32_rounded_once(name):
    """Exactly: the same FP32 arithmetic, then ``.half()``; composites round between their parts."""
    composite = {"var", "norm", "logsumexp", "cross_entropy", "mse_loss", "layer_norm", "group_norm",
                 "attention", "mish", "einsum", "softplus", "logsigmoid"}  # fmt: skip
    ours = run(name, torch.float16, emulated=True)[0]
    exact = run(name, torch.float32, emulated=False)[0].half()
    apart = units_apart(ours, exact, by_largest=True)
    assert apart <= (1.0 if name in composite | ACCUMULATES else 0.0)


def test_there_are_enough_operations():
    assert len(OPERATIONS) >= 60


class Names(TorchDispatchMode):
    """The operations that reach the level below autograd."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, result))
        return result


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
            low = [
                x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in args
            ]
            wide = [
                x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in low
            ]
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
    with (
        torch.autocast("cpu", torch.float16),
        policy.in_force(policy.Policy(torch.float16)),
        Emulation(),
    ):
        ours, _ = lstm(x)

    def rounded(t):
        return t.half().float()

    w_x, w_h, b_x, b_h = (rounded(p.detach()) for p in lstm.parameters())
    h, c = torch.zeros(3, 8), torch.zeros(3, 8)
    for t in range(6):
        gates = rounded(rounded(rounded(x[t]) @ w_x.T + b_x) + rounded(h @ w_h.T + b_h))
        i, f, g, o = gates.chunk(4, 1)
        i, f, o, g = (
            rounded(i.sigmoid()),
            rounded(f.sigmoid()),
            rounded(o.sigmoid()),
            rounded(g.tanh()),
        )
        c = rounded(rounded(f * c) + rounded(i * g))
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
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    plan = mpdiag.PrecisionPlan()
    mp = mpdiag.MixedPrecision(model, optimizer, plan, backend="emulated")
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
