"""What rules of precision blame, and what they leave alone; the answer comes from computing in FP16."""

from __future__ import annotations

import pytest
import torch
from recorded_steps import Net, batch, error_by, record_steps, weighed
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.detection import bf16_findings, find_operations
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.plan import PrecisionPlan

# -- what makes a value narrow ---------------------------------------------------------------------


class Outside(Net):
    """Writes in place outside of every submodule."""

    def forward(self, x):
        h = self.body(x)
        return self.head.function(h)


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
    run = record_steps(tmp_path / "run", model, operations=1)
    analysis = mpdiag.analyze(run)
    found = [f for f in analysis.operations if not f.covered]
    assert {(f.code, f.op) for f in found} == {(code, op) for op in kept}
    assert all("in place" in f.reason and "test_precision_rules.py" in f.reason for f in found)
    assert analysis.verdict.level == "expected"
    assert error_by(model, analysis.plan) < 0.05


def test_one_of_a_chain_is_enough(tmp_path):
    def cosines(z):
        return torch.cos(z * 3000).abs() * 2

    run = record_steps(tmp_path / "run", Net(cosines), operations=1)
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
    run = record_steps(tmp_path / "run", Slope(step), operations=1)
    found = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert {f.module for f in found} == modules
    assert {f.code for f in found} == {"cancellation"}


def test_what_both_sides_of_a_difference_come_from_is_not_blamed(tmp_path):
    def variance(z):
        h = z + 30
        return (h * h).mean(-1) - h.mean(-1) ** 2

    run = record_steps(tmp_path / "run", Net(variance), operations=1)
    found = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert {f.code for f in found} == {"cancellation"}
    assert "body" not in {f.module for f in found}


@pytest.mark.parametrize(("size", "needed"), [(1e-9, True), (1e-4, False)])
def test_factors_that_vanish_are_told(size, needed, tmp_path):
    model = Net(lambda x: torch.tanh(x / size))
    with torch.no_grad():
        model.body.weight.mul_(size)
        model.body.bias.mul_(size)
    run = record_steps(tmp_path / "run", model, operations=1)
    analysis = mpdiag.analyze(run)
    found = [f for f in analysis.operations if not f.covered]
    assert {(f.code, f.op, f.module) for f in found} == (
        {("underflow", "addmm", "body")} if needed else set()
    )
    assert error_by(model, analysis.plan) < 0.05


def test_weight_gradients_of_a_product_in_fp32_limit_no_scale(tmp_path):
    x = 5000 + torch.arange(64.0)[:, None] * torch.ones(1, 2)

    def loss(model, _step):
        return torch.sin(model(x)).square().sum()

    run = record_steps(tmp_path / "run", OfData(), loss, operations=1)
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
    run = record_steps(tmp_path / "run", model, lambda m, _: weighed(m(x)), operations=1)
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
    run = record_steps(
        tmp_path / "far",
        Net(nn.Identity()),
        lambda m, _: F.mse_loss(m(batch()), target),
        operations=1,
    )
    (found,) = [f for f in find_operations(run.operations(), FP16) if not f.covered]
    assert (found.code, found.op, found.module) == ("indistinct", "addmm", "body")
    assert found.evidence["noise"] > 0.1
    run = record_steps(
        tmp_path / "near",
        Net(nn.Identity()),
        lambda m, _: F.mse_loss(m(batch()), batch()),
        operations=1,
    )
    assert find_operations(run.operations(), FP16) == ()
    assert find_operations(run.operations(), BF16) == ()


def test_bf16_has_its_own_judgement(tmp_path):
    model, x = OfData(), coordinates(0.5)
    run = record_steps(tmp_path / "run", model, lambda m, _: weighed(m(x)), operations=1)
    assert find_operations(run.operations(), FP16) == ()
    assert {f.code for f in find_operations(run.operations(), BF16)} == {"indistinct"}
    (finding,) = bf16_findings(run.operations(), FP16)
    assert (finding.code, finding.severity) == ("bf16-precision", "info")
    assert "1 operation" in finding.message
    assert not list(bf16_findings(run.operations(), BF16))


# -- what a GPU lacks ------------------------------------------------------------------------------


def test_an_operation_without_a_half_kernel_is_told(tmp_path):
    def determinant(x):
        return torch.linalg.slogdet(x.view(8, 4, 4))[1]

    run = record_steps(tmp_path / "run", Net(determinant), operations=1)
    plan = mpdiag.analyze(run).plan
    found = {f.code: f for f in find_operations(run.operations(), FP16)}
    assert found["no-half-kernel"].op == "_linalg_slogdet"
    assert "on CUDA" in found["no-half-kernel"].reason
    assert "_linalg_slogdet" in {c.op for c in plan.fp32_operations}
    assert error_by(Net(determinant), plan) < 0.05

    run = record_steps(tmp_path / "wide", Net(lambda x: determinant(x.float())), operations=1)
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
    run = record_steps(tmp_path / "run", Net(function), operations=1)
    found = [f for f in find_operations(run.operations(), FP16) if f.code == "no-half-kernel"]
    assert {f.op for f in found} == {name}
    assert f"torch.{name} refuses FP16 on CUDA" in found[0].reason
    plan = mpdiag.analyze(run).plan
    assert name in {c.op for c in plan.fp32_operations}
    assert error_by(Net(function), plan) < 0.05


def test_the_product_of_a_sparse_matrix_gets_fp32_on_both_sides(tmp_path):
    mixing = torch.eye(8).to_sparse()

    def mixed(x):
        return torch.sparse.mm(mixing, x).sum(1)

    run = record_steps(tmp_path / "run", Net(mixed), operations=1)
    (finding,) = find_operations(run.operations(), FP16)
    assert (finding.code, finding.op) == ("no-half-kernel", "_sparse_addmm")
    assert "takes operands of one dtype, and autocast casts none of them" in finding.reason
    plan = mpdiag.analyze(run).plan
    assert {c.op for c in plan.fp32_operations} == {"_sparse_addmm"}
    assert error_by(Net(mixed), plan) < 0.05

    run = record_steps(tmp_path / "wide", Net(lambda x: mixed(x.float())), operations=1)
    assert find_operations(run.operations(), FP16) == ()


@pytest.mark.parametrize(("length", "told"), [(16, False), (12, True)])
def test_a_fourier_transform_in_fp16_takes_powers_of_two(tmp_path, length, told):
    def spectrum(x):
        return torch.fft.rfft(x[:, :length]).abs().sum(1)

    run = record_steps(tmp_path / "run", Net(spectrum), operations=1)
    found = [f for f in find_operations(run.operations(), FP16) if f.code == "no-half-kernel"]
    assert [f.aten for f in found] == ["_fft_r2c"] * told
    assert all("powers of two alone, and not 12" in f.reason for f in found)
    assert {f.aten for f in find_operations(run.operations(), BF16)} >= {"_fft_r2c"}


def test_a_loss_that_autocast_refuses_is_told(tmp_path):
    def loss(m, _step):
        chances = m(batch()).sigmoid()
        return nn.functional.binary_cross_entropy(chances, torch.full_like(chances, 0.5))

    run = record_steps(tmp_path / "run", Net(nn.Identity()), loss, operations=1)
    (finding,) = (f for f in mpdiag.analyze(run).findings if f.code == "refused-by-autocast")
    assert "torch.autocast refuses binary_cross_entropy on CUDA" in finding.message
    assert (
        finding.evidence["where"].startswith("test_precision_rules.py") or finding.evidence["where"]
    )
    run = record_steps(
        tmp_path / "logits",
        Net(nn.Identity()),
        lambda m, _: F.binary_cross_entropy_with_logits(m(batch()), torch.ones(8, 16)),
        operations=1,
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
    run = record_steps(tmp_path / "run", model, lambda m, _: F.cross_entropy(m(x), y), operations=1)
    for target in (FP16, BF16):
        assert [f for f in find_operations(run.operations(), target) if not f.covered] == []
