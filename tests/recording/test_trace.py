"""The trace of a step: positions, what is written, and twins against moved inputs."""

import copy

import numpy as np
import pytest
import torch
from recorded import Wrapped, model_and_optimizer, steps
from recorded_steps import record_steps
from torch import nn

import mpdiag
from mpdiag.emulation.step_twins import spreads
from mpdiag.numerics.trimmed import is_few
from mpdiag.recording import operations, trace
from mpdiag.recording.trace import TraceWatch
from mpdiag.runs.trace import decode, encode, positions
from mpdiag.tracing.storages import elements_of, read_back


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1000,), (3, 4), (64, 7, 9), (2, 0), (0, 3)])
def test_positions_lie_inside_and_only_once(shape):
    found = positions(shape)
    assert len(set(found.tolist())) == found.size <= 64
    assert ((found >= 0) & (found < max(1, int(np.prod(shape))))).all()


def test_small_tensors_are_looked_at_whole_and_long_rows_all_along():
    for shape in ((), (64,), (8, 8), (3, 2, 4)):
        assert positions(shape).tolist() == list(range(int(np.prod(shape))))
    columns = positions((100, 1000)) % 1000
    assert columns.max() - columns.min() > 500


def test_rows_of_half_a_batch_are_looked_at_in_the_same_places():
    whole, half = positions((16, 5, 7)), positions((8, 5, 7))
    assert set((half + 8 * 35).tolist()) & set(whole.tolist())
    assert set(half.tolist()) & set(whole.tolist())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(6.0).expand(4, 6),
        torch.arange(48.0).reshape(4, 12)[1:, ::2],
        torch.tensor(3.0),
    ],
)
def test_elements_are_those_of_the_tensor_however_it_lies(tensor):
    numbers = positions(tuple(tensor.shape))
    assert torch.equal(elements_of(tensor, numbers), tensor.reshape(-1)[torch.from_numpy(numbers)])


def test_a_trace_is_read_as_it_was_written_and_has_the_training_s_values(tmp_path):
    model, optimizer = model_and_optimizer()
    before = model[2].weight.detach().clone()
    with mpdiag.record(model, optimizer, tmp_path / "run", trace=[1, 3], every=2) as recorder:
        steps(5, model, optimizer)
    assert recorder.failures == []
    run = mpdiag.open_run(tmp_path / "run")
    rows = run.trace()
    assert {r.step for r in rows} == {1, 3}
    assert run.meta["trace"].items() >= {"steps": [1, 3], "reason": ""}.items()
    ((names, settings),) = run.meta["trace"]["settings"]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert settings.items() >= {"type": "SGD", "lr": "0.1", "momentum": "0"}.items()
    assert {o.step for o in run.operations()} == {0}
    again = list(decode(encode(rows)))
    for a, b in zip(rows, again, strict=True):
        assert np.array_equal(a.values, b.values)
        assert {**vars(a), "values": 0, "at": 0} == {**vars(b), "values": 0, "at": 0}
    assert {r.operand_format for r in rows} == {""}  # as torch's default is on a CPU
    newer = ["reads", "operand_format"]  # columns that traces did not always have
    older = next(decode(encode(rows).drop_columns(newer)))
    assert (older.reads, older.operand_format) == ((), "")
    of = {(r.step, r.kind, r.name): r for r in rows}
    last = of[3, "weight", "2.weight"]
    assert last.norm != pytest.approx(float(before.norm()), rel=1e-9)
    updated, gradient = of[3, "updated_weight", "2.weight"], of[3, "weight_grad", "2.weight"]
    assert updated.values == pytest.approx(last.values - 0.1 * gradient.values, abs=1e-6)
    product = of[1, "operation", "addmm"]
    assert (product.module, product.phase) == ("2", "forward")
    assert "test_trace" not in product.file
    assert 0 < product.spread < 1e-5 * np.sqrt(np.mean(product.values**2))


def test_a_twin_comes_apart_as_far_as_the_formats_say(tmp_path):
    """Beside 1000 an ulp is 6e-5; so much of it is left when 1000 is taken away again."""
    loss = lambda model, _: model(torch.randn(8, 8)).square().mean()  # noqa: E731
    weight = nn.ParameterList([torch.ones(1)])
    model = Wrapped(weight, lambda b, x: (x + 1000.0 - 1000.0) * b[0])  # what rounding leaves of it
    run = record_steps(tmp_path / "run", model, loss, trace=True)
    output = next(r for r in run.trace() if r.kind == "output")
    assert 2e-5 < output.spread < 4e-4


class Grows(nn.Module):
    """Its second factor is zero before the first step, so the first one has no gradient then."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x))


def trained(model, folder, traced, total):
    """A run's rows by step and by what they are of."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, folder, trace=traced) as recorder:
        for _ in range(total):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)) - 1).square().mean().backward()
            optimizer.step()
    assert recorder.failures == []
    rows = mpdiag.open_run(folder).trace()
    return {(r.step, r.kind, r.module, r.name, r.call): r for r in rows}


def relative(row):
    return row.spread / np.sqrt(np.mean(row.values**2))


class Means(nn.Module):
    """Means over 256 BF16 values each: all equal, or not."""

    def __init__(self, alike):
        super().__init__()
        parts = torch.rand(128, 1).expand(128, 256) if alike else torch.rand(128, 256)
        self.parts = nn.Parameter(1 + parts.clone())

    def forward(self, x):
        return x[:, :1] + (self.parts.bfloat16() * 1.37).float().mean(1).sum()


def test_equal_values_round_alike(tmp_path):
    """Their errors do not cancel in a mean, as those of other values do: by √256 = 16."""
    alike, others = (
        relative(trained(Means(same), tmp_path / str(same), [0], 1)[0, "operation", "", "mean", 0])
        for same in (True, False)
    )
    assert 2.0**-9 < alike < 2.0**-6  # two results, each by an ulp of 2⁻⁷ at most
    assert others < alike / 4


class Lengths(nn.Module):
    """Square roots of sums of squares, of which one row has none."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        wide = x.repeat(1, 8) * self.scale * (torch.arange(16) > 0)[:, None]
        return (wide.square().sum(1, keepdim=True) + 1e-12).sqrt()


def test_a_twin_makes_no_square_negative(tmp_path):
    rows = trained(Lengths(), tmp_path / "run", [0], 1)
    assert mpdiag.open_run(tmp_path / "run").meta["trace"]["reason"] == ""
    assert rows[0, "weight_grad", "", "scale", 0].spread > 0


@pytest.mark.parametrize(
    ("values", "few"),
    [
        (np.ones(63), True),
        (np.ones(64), True),
        (np.linspace(0.5, 1, 64), False),
        (np.random.default_rng(0).normal(size=64), False),
        (np.r_[np.ones(8), np.zeros(56)], True),
        (np.r_[np.ones(8), np.full(56, 1e-3)], True),
        (np.r_[np.inf, np.ones(63)], False),
        (np.zeros(64), True),
    ],
)
def test_few_values_may_carry_a_tensor(values, few):
    assert is_few(values) is few


def test_later_steps_have_the_spread_of_the_first_beside_their_own_size(tmp_path, monkeypatch):
    """And that is near what a twin of their own would show."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    again = copy.deepcopy(model)
    twins = []
    monkeypatch.setattr(trace, "spreads", lambda *a: twins.append(a) or spreads(*a))
    rows = trained(model, tmp_path / "run", [1, 6], 8)
    assert len(twins) == 1
    monkeypatch.setattr(TraceWatch, "wants_twin", TraceWatch.wants)
    own = trained(again, tmp_path / "own", [1, 6], 8)
    assert len(twins) == 3
    later = [k for k, row in rows.items() if k[0] == 6 and row.spread]
    assert len(later) > 10
    for key in later:
        assert relative(rows[key]) == pytest.approx(relative(rows[(1, *key[1:])]))
        assert 0.2 < relative(rows[key]) / relative(own[key]) < 5
    assert {k for k, row in own.items() if row.spread is None} == {
        k for k, row in rows.items() if row.spread is None
    }


def test_a_tensor_that_was_zero_has_a_twin_in_the_next_traced_step(tmp_path):
    rows = trained(Grows(), tmp_path / "run", [0, 1, 2, 3], 5)
    spread = [rows[step, "weight_grad", "down", "down.weight", 0].spread for step in range(4)]
    assert spread[:2] == [0.0, None]
    assert spread[2] > 0
    assert spread[3] > 0


@pytest.mark.parametrize(
    ("layer", "least", "most"), [(nn.BatchNorm2d, 4e-7, 4e-6), (None, 0, 4e-7)]
)
def test_rounding_moves_a_channel_of_batch_normalization_as_a_whole(layer, least, most, tmp_path):
    """Its sums over 4096 values are off for all of them, so a mean over the channel keeps the error."""
    torch.manual_seed(1)
    norm = nn.Identity() if layer is None else layer(4)
    model = nn.Sequential(
        nn.Linear(8, 1024), nn.Unflatten(1, (4, 16, 16)), norm, nn.AvgPool2d(16), nn.Flatten()
    )
    nn.init.ones_(norm.bias if layer else model[0].bias)
    row = trained(model, tmp_path / "run", [0], 1)[0, "operation", "3", "avg_pool2d", 0]
    assert least < relative(row) < most


def test_rounding_moves_the_sum_of_a_batch_in_the_gradient_of_a_parameter(tmp_path):
    torch.manual_seed(1)
    layers = (
        nn.Linear(8, 1024),
        nn.Unflatten(1, (4, 16, 16)),
        nn.Conv2d(4, 4, 1),
        nn.GroupNorm(1, 4),
    )
    rows = trained(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), tmp_path / "run", [0], 1)
    summed = [rows[0, "operation", name, op, i] for name, op, i in SUMS]
    assert all(1e-6 < relative(row) < 1e-5 for row in summed)
    passed = rows[0, "gradient", "3", "", 0], rows[0, "operation", "4", "convolution_backward", 0]
    assert all(relative(row) < 1e-6 for row in passed)


@pytest.mark.parametrize("largest", [1.0, 8.0])
def test_what_a_layer_norm_loses_in_half_precision_shows_in_its_twin(largest, tmp_path):
    """Of 4096 rows in BF16 a CPU loses most of a sum, be it of all channels or of one large one."""
    found = []
    for half in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            layers = (nn.Linear(8, 4096), nn.Unflatten(1, (256, 16)), nn.LayerNorm(16))
            rows = trained(nn.Sequential(*layers, Mean(largest)), tmp_path / str(half), [0], 1)
        found.append(rows[0, "operation", "2", "native_layer_norm_backward", 2])
    exact, low = found
    assert low.dtype == "float32"
    assert relative(exact) < 0.01
    sizes = [np.sqrt(np.mean(row.values**2)) for row in (exact, low)]
    assert sizes[1] < 0.5 * sizes[0]
    assert low.spread == pytest.approx(sizes[0] - sizes[1], rel=0.1)


class Mean(nn.Module):
    """Over 256 rows; one channel counts more."""

    def __init__(self, largest):
        super().__init__()
        self.register_buffer("factors", torch.ones(16).index_fill(0, torch.tensor([3]), largest))

    def forward(self, x):
        return (x * self.factors).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.frozen = nn.LSTM(8, 8, num_layers=2), nn.LSTM(8, 8)

    def forward(self, x):
        with torch.no_grad():
            start = self.frozen(x[:, None])[0]
        return self.own(start + x[:, None])[0][:, 0]


def test_an_lstm_has_a_twin_though_its_backward_pass_needs_a_workspace(tmp_path):
    rows = trained(Recurrent(), tmp_path / "run", [0], 1)
    assert mpdiag.open_run(tmp_path / "run").meta["trace"]["reason"] == ""
    for name in ("own.weight_ih_l0", "own.weight_hh_l1"):
        assert 1e-8 < relative(rows[0, "weight_grad", "own", name, 0]) < 1e-5


class Near(nn.Module):
    """What two nearly equal numbers leave, after memory that no operation was seen to change."""

    def __init__(self, unseen):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64, 8) + 1.0)
        self.held, self.unseen = torch.ones(64, 1), unseen

    def forward(self, x):
        near = self.scale.detach() * self.held
        self.held.numpy()[:] += self.unseen  # the tape has what it was before
        return (self.scale * self.held - near * (1 + 2e-7)).square().sum() * x.square().sum(1)


@pytest.mark.parametrize(
    ("unseen", "reason"), [(0.0, ""), (1.0, "run again, the step gave other gradients")]
)
def test_rounding_may_make_other_gradients_of_a_faithful_tape_alone(unseen, reason, tmp_path):
    rows = trained(Near(unseen), tmp_path / "run", [0], 1)
    assert mpdiag.open_run(tmp_path / "run").meta["trace"]["reason"] == reason
    row = rows[0, "weight_grad", "", "scale", 0]
    assert row.spread is None if reason else relative(row) > 0.5


SUMS = (
    ("4", "convolution_backward", 1),
    ("4", "convolution_backward", 2),
    ("3", "native_group_norm_backward", 1),
    ("3", "native_group_norm_backward", 2),
)
"""Each adds 4096 values."""


def test_vectors_of_several_dtypes_are_read_back_each_in_its_own():
    given = [[2**40 + 1, 3], [0.1], [], [True, False], [2**52 + 1]]
    types = (torch.int64, torch.float64, torch.float32, torch.bool, torch.int64)
    found = read_back([torch.tensor(v, dtype=t) for v, t in zip(given, types, strict=True)])
    assert [values.tolist() for values in found] == given
    assert {values.dtype for values in found} == {np.dtype(np.float64)}


def test_elements_of_fp8_are_taken():
    tensor = torch.arange(8.0).to(torch.float8_e4m3fn).view(2, 4).t()
    assert elements_of(tensor, np.array([1, 6])).tolist() == [4.0, 3.0]


@pytest.mark.parametrize(("allowed", "least", "most"), [("tf32", 3e-4, 3e-3), ("", 0.0, 3e-6)])
def test_a_twin_rounds_the_operands_that_a_backend_may_round(
    allowed, least, most, tmp_path, monkeypatch
):
    """For the product alone: what else is made of these operands is as exact as before."""

    def found(func, _read):
        return allowed if func.overloadpacket.__name__ in ("addmm", "mm") else ""

    monkeypatch.setattr("mpdiag.recording.operations.operand_format", found)
    torch.manual_seed(1)
    rows = trained(Shared(), tmp_path / "run", [0, 1], 2)
    products = rows[0, "operation", "linear", "addmm", 0], rows[0, "operation", "linear", "mm", 0]
    assert all(least < relative(row) < most for row in products)
    assert relative(rows[0, "operation", "", "exp", 0]) < 3e-7
    assert {rows[s, "operation", "linear", "addmm", 0].operand_format for s in (0, 1)} == {allowed}
    assert rows[0, "operation", "", "exp", 0].operand_format == ""


class Shared(nn.Module):
    """A product, and then something else of its operand."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 64)

    def forward(self, x):
        return self.linear(x) + self.linear.weight.exp()[:, 0]


def test_a_norm_holds_what_is_small_beside_its_largest_values():
    """Gradients of 2000 classes: one of -1 in a row, the others are about 1/2000."""
    probabilities = torch.full((256, 2000), 1 / 2000)
    probabilities[:, 7] = -1.0
    for given in (probabilities, probabilities.bfloat16()):
        exact = float(given.double().norm())
        assert float(trace._norm(given)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        torch.linspace(-1, 2, 4097),  # one more than whole rows
        torch.linspace(-1, 2, 30_000).view(100, 300).T,
        torch.linspace(-1, 2, 30_000).view(100, 300)[:, ::2],
        torch.linspace(-1, 2, 300).expand(64, 300),
        torch.linspace(-1, 2, 3)[:, None].expand(3, 5000),
        torch.ones(()).expand(100, 100),
        torch.arange(9000),
        torch.linspace(-1, 2, 9000, dtype=torch.float64),
    ],
    ids=lambda x: "x".join(map(str, (*x.shape, *x.stride()))),
)
def test_a_norm_counts_each_element_once_however_it_lies_in_memory(given):
    assert float(trace._norm(given)) == pytest.approx(float(given.double().norm()), rel=1e-6)


def distilled(folder, before, teacher, **options):
    """A student's run, in steps 0 and 1, where ``before`` is called before each step's first pass."""
    torch.manual_seed(0)
    student = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with mpdiag.record(student, optimizer, folder, trace=True, **options) as recorder:
        for _ in range(2):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            wanted = before(student, teacher, x)
            (student(x) - wanted).square().mean().backward()
            optimizer.step()
    assert recorder.failures == []
    rows = [r for r in mpdiag.open_run(folder).trace() if r.step == 0]
    assert not any(r.spread is None for r in rows if r.kind == "operation")
    return rows


def names(rows):
    """Of the forward pass's operations, without where the backward pass begins."""
    forward = [r.name for r in rows if (r.kind, r.phase) == ("operation", "forward")]
    return forward[: forward.index("ones_like")]


@pytest.mark.parametrize(
    ("without", "product"), [(torch.no_grad, "addmm"), (torch.inference_mode, "linear")]
)
def test_what_is_called_without_gradients_before_the_first_pass_is_traced(
    without, product, tmp_path
):
    @without()
    def called(_student, teacher, x):
        return teacher(x) * 2

    teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False).eval()
    rows = distilled(tmp_path / "run", called, teacher)
    assert names(rows) == [product, "tanh", "mul", "addmm", "sub", "pow", "mean"]
    made = next(r for r in rows if r.name == "mul")
    assert made.order in next(r for r in rows if r.name == "sub").reads


def test_a_model_s_own_samples_are_traced_and_its_evaluation_is_not(tmp_path):
    @torch.no_grad()
    def sampled(student, _teacher, x):
        return student(x * 0.5) + 1

    @torch.no_grad()
    def evaluated(student, _teacher, x):
        loss = student.eval()(x * 0.5).square().mean()
        student.train()
        return 0.0 * float(loss)

    @torch.no_grad()
    def measured(student, teacher, x):
        teacher(x).sum()  # which nothing of the step reads
        student(x).sum()
        return 0.0

    own = distilled(tmp_path / "own", sampled, None)
    assert names(own) == ["addmm", "add", "addmm", "sub", "pow", "mean"]
    assert [r.call for r in own if r.kind == "output"] == [0, 1]
    assert [r.kind for r in own if r.kind in ("input", "output")] == ["input", "output"] * 2
    none = distilled(tmp_path / "none", lambda *_: 0.0, None)
    for i, before in enumerate((evaluated, measured)):
        rows = distilled(tmp_path / str(i), before, nn.Linear(8, 8))
        assert [(r.kind, r.name) for r in rows] == [(r.kind, r.name) for r in none]


def test_all_results_of_an_operation_before_the_first_pass_are_traced(tmp_path):
    """Of a norm the step reads the first one alone, and of a teacher in a later part it has all."""

    @torch.no_grad()
    def called(_student, teacher, x):
        teacher(x).sum()  # which nothing of the step reads
        return teacher(x)

    rows = distilled(tmp_path / "run", called, nn.LayerNorm(8).requires_grad_(False))
    assert names(rows) == ["native_layer_norm"] * 3 + ["addmm", "sub", "pow", "mean"]
    assert [r.shape for r in rows if r.name == "native_layer_norm"] == [(4, 8), (4, 1), (4, 1)]


def test_long_sampling_before_a_step_does_not_end_its_trace(tmp_path, monkeypatch):
    @torch.no_grad()
    def sampled(_student, teacher, x):
        for _ in range(20):
            x = teacher(x)
        return x

    monkeypatch.setattr(operations, "_MOST_BEFORE", 8)
    rows = distilled(tmp_path / "run", sampled, nn.Linear(8, 8))
    assert names(rows)[-4:] == ["addmm", "sub", "pow", "mean"]
    assert len(names(rows)) <= 8 + 4
