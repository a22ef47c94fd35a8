"""Each rule of precision on a small model of known answer; the answer comes from computing in FP16.

Where the emulated policy gives another result than FP32, the operation must be found and the plan must
mend it; where it does not, nothing may be found.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.detection import bf16_findings, find_operations
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run


class Net(nn.Module):
    """A linear layer and a function of its output."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.function = function

    def forward(self, x):
        return self.function(self.body(x))


def log_of_a_cast(z):
    p = F.softmax(z * 15, -1, dtype=torch.float32)
    p = p.to(z.dtype)
    return p.log().clamp_min(-1000)


def log_of_a_cast_by_name(z):
    dtype = z.dtype
    p = F.softmax(z.float() * 15, -1).to(dtype)
    return p.log().clamp_min(-1000)


def length_of_small_values(x):
    h = x * 1e-4
    return h / (h * h).sum(-1, keepdim=True).sqrt()


def rotated(x):
    angles = torch.einsum("i,j->ij", torch.arange(8.0) + 3001, 1 / torch.arange(1.0, 17))
    return x * angles.cos()


def norm_in_fp32(x):
    dtype = x.dtype
    x = (x * 1000).to(torch.float32)
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)).to(dtype)


def squares_in_fp32(x):
    h = x.float() * 1000
    return (h * h).mean(-1).sqrt()


def clamped(p):
    return p.clamp(-1 + 1e-6, 1 - 1e-6)


# name: function, codes that the policy does not cover
CASES = {
    "cosine of large angles": (lambda x: torch.cos(x * 3000), {"imprecise"}),
    "cosine of small angles": (torch.cos, set()),
    "angles from einsum": (rotated, {"imprecise"}),
    "logit of a clamped probability": (
        lambda x: torch.logit(torch.sigmoid(x * 40).clamp(1e-6, 1 - 1e-6)),
        {"diverging"},
    ),
    "logit of an ordinary one": (lambda x: torch.logit(torch.sigmoid(x)), set()),
    "atanh of a clamped value": (lambda x: torch.atanh(clamped(torch.tanh(x * 10))), {"diverging"}),
    "acos of a clamped value": (lambda x: torch.acos(clamped(torch.tanh(x * 10))), {"diverging"}),
    "log1p(-p)": (
        lambda x: torch.log1p(-torch.sigmoid(x * 40).clamp(1e-6, 1 - 1e-6)),
        {"diverging"},
    ),
    "log(1 - p)": (
        lambda x: torch.log(1 - torch.sigmoid(x * 40).clamp(1e-6, 1 - 1e-6)),
        {"vanishing"},
    ),
    "log(1 - p) with room": (lambda x: torch.log(1 - torch.sigmoid(x) + 1e-3), set()),
    "squares that vanish before an FP32 sum": (length_of_small_values, {"vanishing"}),
    "a cast that follows another dtype": (log_of_a_cast, {"vanishing"}),
    "the same by a variable": (log_of_a_cast_by_name, {"vanishing"}),
    "a norm that converts to FP32 and back": (norm_in_fp32, set()),
    "squares converted to FP32 before": (squares_in_fp32, set()),
}


def batch():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def weighed(output):
    weights = torch.rand(output.shape, generator=torch.Generator().manual_seed(2))
    return (output.float() * weights).mean()


def recorded(model, step, folder, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.record(model, optimizer, folder, operations=1):
        for _ in range(steps):
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
    return open_run(folder)


def difference(value, exact):
    error = value.detach().float() - exact
    return float(error.norm() / exact.norm()) if error.isfinite().all() else float("inf")


def error_by(model, plan, forward, level="O1"):
    """How far the plan's output and gradient are from FP32's, relative to their norms."""
    model.zero_grad()
    output = forward(model)
    weighed(output).backward()
    exact = model.body.weight.grad.clone()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.MixedPrecision(model, optimizer, plan, level=level) as mp:
        with mp.autocast():
            low = forward(model)
            loss = weighed(low)
        mp.backward(loss)
        gradient = model.body.weight.grad / mp.loss_scale
    return max(difference(low, output.detach()), difference(gradient, exact))


@pytest.mark.parametrize("case", CASES)
def test_flags_are_true_and_the_plan_mends_them(case, tmp_path):
    function, codes = CASES[case]
    model = Net(function)
    run = recorded(model, lambda m: weighed(m(batch())), tmp_path / "run")
    plan = mpdiag.analyze(run).plan
    found = find_operations(run.operations(), FP16, plan.loss_scale.recommended)
    assert {f.code for f in found if not f.covered} == codes
    for f in found:
        assert "test_precision_rules.py" in f.where
        assert f.reason
        assert f.fix

    bare = error_by(model, PrecisionPlan(loss_scale=plan.loss_scale), lambda m: m(batch()))
    assert (bare > 0.05) == bool(codes), bare
    assert error_by(model, plan, lambda m: m(batch())) < 0.05


# -- what makes a value narrow ---------------------------------------------------------------------


class Outside(nn.Module):
    """Writes in place outside of every submodule."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.function = function

    def forward(self, x):
        h = self.body(x)
        return self.function(h)


def squared_in_place(h):
    power = (h * 400).clone()
    power *= h * 400
    return power.log1p()


def masked_in_place(h):
    scores = h @ h.T
    scores.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e9)
    return scores.softmax(-1)


def summed_in_place(h):
    loud = (h * 30000).relu()
    total = loud.new_zeros(2, 16)
    total.index_add_(0, torch.zeros(8, dtype=torch.long), loud)
    return total / 30000


IN_PLACE = {
    "a square": (squared_in_place, "overflow", {"mul"}),
    "a mask": (masked_in_place, "mask-fill", {"mm"}),
    "a sum": (summed_in_place, "overflow", {"relu"}),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_write_in_place_is_kept_wide_where_its_tensor_was_made(case, tmp_path):
    function, code, kept = IN_PLACE[case]
    model = Outside(function)
    run = recorded(model, lambda m: weighed(m(batch())), tmp_path / "run")
    analysis = mpdiag.analyze(run)
    found = [f for f in analysis.operations if not f.covered]
    assert {(f.code, f.op) for f in found} == {(code, op) for op in kept}
    assert all("in place" in f.reason and "test_precision_rules.py" in f.reason for f in found)
    assert analysis.verdict.level == "expected"
    assert error_by(model, analysis.plan, lambda m: m(batch())) < 0.05


def test_one_of_a_chain_is_enough(tmp_path):
    def cosines(z):
        return torch.cos(z * 3000).abs() * 2

    run = recorded(Net(cosines), lambda m: weighed(m(batch())), tmp_path / "run")
    found = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert [(f.op, f.module) for f in found] == [("addmm", "body")]


class Slope(nn.Module):
    """The difference quotient of a network."""

    def __init__(self, step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.first, self.body = nn.Linear(16, 16), nn.Linear(16, 16)

    def value(self, x):
        return self.body(torch.tanh(self.first(x)))

    def forward(self, x):
        return (self.value(x + self.step) - self.value(x)) / self.step


@pytest.mark.parametrize(("step", "modules"), [(1e-4, {"first", "body"}), (3e-3, {"body"})])
def test_layers_before_a_difference_count_where_it_is_smaller_than_rounding(
    step, modules, tmp_path
):
    run = recorded(Slope(step), lambda m: weighed(m(batch())), tmp_path / "run")
    found = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert {f.module for f in found} == modules
    assert {f.code for f in found} == {"cancellation"}


def test_what_both_sides_of_a_difference_come_from_is_not_blamed(tmp_path):
    def variance(z):
        h = z + 30
        return (h * h).mean(-1) - h.mean(-1) ** 2

    run = recorded(Net(variance), lambda m: weighed(m(batch())), tmp_path / "run")
    found = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert {f.code for f in found} == {"cancellation"}
    assert "body" not in {f.module for f in found}


@pytest.mark.parametrize(("size", "needed"), [(1e-9, True), (1e-4, False)])
def test_factors_that_vanish_are_told(size, needed, tmp_path):
    model = Net(lambda x: torch.tanh(x / size))
    with torch.no_grad():
        model.body.weight.mul_(size)
        model.body.bias.mul_(size)
    run = recorded(model, lambda m: weighed(m(batch())), tmp_path / "run")
    analysis = mpdiag.analyze(run)
    found = [f for f in analysis.operations if not f.covered]
    assert {(f.code, f.op, f.module) for f in found} == (
        {("underflow", "addmm", "body")} if needed else set()
    )
    assert error_by(model, analysis.plan, lambda m: m(batch())) < 0.05


def test_weight_gradients_of_a_product_in_fp32_limit_no_scale(tmp_path):
    x = 5000 + torch.arange(64.0)[:, None] * torch.ones(1, 2)

    def loss(model):
        return torch.sin(model(x)).square().sum()

    run = recorded(OfData(), loss, tmp_path / "run")
    analysis = mpdiag.analyze(run)
    assert {(f.op, f.module) for f in analysis.operations if not f.covered} == {("addmm", "body")}
    h = analysis.layers.of_kind("weight_grad").histograms
    assert h.absmax.max() > 65504
    assert analysis.loss_scale.limiting_layer == "body"
    assert not analysis.plan.loss_scale.needed
    streamed = RunStatistics(run.pieces)
    held = RunStatistics.of(run.records)
    for statistics in (streamed, held):
        rest = statistics.without_weight_gradients({"body"})
        assert len(rest.layers().of_kind("weight_grad")) == 0
        assert rest.step_maxima()[1].max() == h_of(statistics, "activation_grad")


def h_of(statistics, kind):
    return statistics.layers().of_kind(kind).histograms.absmax.max()


# -- data ------------------------------------------------------------------------------------------


class OfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(2, 16)

    def forward(self, x):
        return self.body(x)


def coordinates(spread):
    return torch.tensor([48.85, 2.35]) + spread * torch.randn(
        64, 2, generator=torch.Generator().manual_seed(3)
    )


@pytest.mark.parametrize(("spread", "needed"), [(0.005, True), (5.0, False)])
def test_data_that_differ_less_than_their_rounding_are_told(spread, needed, tmp_path):
    model, x = OfData(), coordinates(spread)
    run = recorded(model, lambda m: weighed(m(x)), tmp_path / "run")
    analysis = mpdiag.analyze(run)
    found = [f for f in analysis.operations if not f.covered]
    assert {(f.code, f.op, f.module) for f in found} == (
        {("indistinct", "addmm", "body")} if needed else set()
    )

    def centred(m):
        output = m(x)
        return output - output.float().mean(0)

    bare = error_by(model, PrecisionPlan(loss_scale=analysis.plan.loss_scale), centred)
    assert (bare > 0.05) == needed
    assert error_by(model, analysis.plan, centred) < 0.05


def test_a_target_far_from_zero_asks_for_an_fp32_output(tmp_path):
    target = 300 + 0.1 * batch()
    run = recorded(Net(lambda x: x), lambda m: F.mse_loss(m(batch()), target), tmp_path / "far")
    (found,) = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert (found.code, found.op, found.module) == ("indistinct", "addmm", "body")
    assert found.evidence["noise"] > 0.1
    run = recorded(Net(lambda x: x), lambda m: F.mse_loss(m(batch()), batch()), tmp_path / "near")
    assert find_operations(run.operations(), FP16) == ()
    assert find_operations(run.operations(), BF16) == ()


def test_bf16_has_its_own_judgement(tmp_path):
    model, x = OfData(), coordinates(0.5)
    run = recorded(model, lambda m: weighed(m(x)), tmp_path / "run")
    assert find_operations(run.operations(), FP16) == ()
    assert {f.code for f in find_operations(run.operations(), BF16)} == {"indistinct"}
    (finding,) = bf16_findings(run.operations(), FP16)
    assert (finding.code, finding.severity) == ("bf16-precision", "info")
    assert "1 operation" in finding.message
    assert bf16_findings(run.operations(), BF16) == []


# -- what a GPU lacks ------------------------------------------------------------------------------


def test_an_operation_without_a_half_kernel_is_told(tmp_path):
    def determinant(x):
        return torch.linalg.slogdet(x.view(8, 4, 4))[1]

    run = recorded(Net(determinant), lambda m: weighed(m(batch())), tmp_path / "run")
    plan = mpdiag.analyze(run).plan
    found = {f.code: f for f in find_operations(run.operations(), FP16)}
    assert found["no-half-kernel"].op == "_linalg_slogdet"
    assert "on CUDA" in found["no-half-kernel"].reason
    assert "_linalg_slogdet" in {c.op for c in plan.fp32_operations}
    assert error_by(Net(determinant), plan, lambda m: m(batch())) < 0.05

    run = recorded(
        Net(lambda x: determinant(x.float())), lambda m: weighed(m(batch())), tmp_path / "wide"
    )
    assert "no-half-kernel" not in {f.code for f in find_operations(run.operations(), FP16)}


def middle(x):
    """A median, as of robust losses."""
    return torch.quantile(x, 0.5, dim=1)


def powers(x):
    return torch.linalg.matrix_power(x.view(-1, 4, 4), 3).sum((1, 2))


@pytest.mark.parametrize(
    ("function", "name"), [(middle, "quantile"), (powers, "linalg_matrix_power")]
)
def test_a_function_that_refuses_half_precision_is_told_by_its_own_name(tmp_path, function, name):
    run = recorded(Net(function), lambda m: weighed(m(batch())), tmp_path / "run")
    found = [f for f in find_operations(run.operations(), FP16) if f.code == "no-half-kernel"]
    assert {f.op for f in found} == {name}
    assert f"torch.{name} refuses FP16 on CUDA" in found[0].reason
    plan = mpdiag.analyze(run).plan
    assert name in {c.op for c in plan.fp32_operations}
    assert error_by(Net(function), plan, lambda m: m(batch())) < 0.05


@pytest.mark.parametrize(("length", "told"), [(16, False), (12, True)])
def test_a_fourier_transform_in_fp16_takes_powers_of_two(tmp_path, length, told):
    def spectrum(x):
        return torch.fft.rfft(x[:, :length]).abs().sum(1)

    run = recorded(Net(spectrum), lambda m: weighed(m(batch())), tmp_path / "run")
    found = [f for f in find_operations(run.operations(), FP16) if f.code == "no-half-kernel"]
    assert [f.aten for f in found] == ["_fft_r2c"] * told
    assert all("powers of two alone, and not 12" in f.reason for f in found)
    assert {f.aten for f in find_operations(run.operations(), BF16)} >= {"_fft_r2c"}


def test_a_loss_that_autocast_refuses_is_told(tmp_path):
    def loss(m):
        chances = m(batch()).sigmoid()
        return nn.functional.binary_cross_entropy(chances, torch.full_like(chances, 0.5))

    run = recorded(Net(lambda x: x), loss, tmp_path / "run")
    (finding,) = (f for f in mpdiag.analyze(run).findings if f.code == "refused-by-autocast")
    assert "torch.autocast refuses binary_cross_entropy on CUDA" in finding.message
    assert (
        finding.evidence["where"].startswith("test_precision_rules.py") or finding.evidence["where"]
    )
    run = recorded(
        Net(lambda x: x),
        lambda m: nn.functional.binary_cross_entropy_with_logits(m(batch()), torch.ones(8, 16)),
        tmp_path / "logits",
    )
    assert "refused-by-autocast" not in {f.code for f in mpdiag.analyze(run).findings}


# -- ordinary networks -----------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu(self.c(self.a(x)))
        return self.head(F.relu(h + self.d(self.b(h))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def attention():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(32, 16), layer, nn.Flatten(), nn.Linear(16 * 6, 4))


def perceptron():
    layers = [m for _ in range(6) for m in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


ORDINARY = {
    "residual": (Residual, lambda: torch.rand(8, 3, 8, 8)),
    "attention": (attention, lambda: torch.randint(0, 32, (8, 6))),
    "recurrent": (Recurrent, lambda: torch.randn(8, 6, 8)),
    "perceptron": (perceptron, lambda: torch.randn(8, 8)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_network_is_told_nothing(name, tmp_path):
    build, data = ORDINARY[name]
    torch.manual_seed(0)
    model, x = build(), data()
    y = torch.arange(8) % 4
    run = recorded(model, lambda m: F.cross_entropy(m(x), y), tmp_path / "run")
    for target in (FP16, BF16):
        assert [f for f in find_operations(run.operations(), target) if not f.covered] == []
