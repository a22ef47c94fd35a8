"""What rules of precision blame, and what they leave alone; the answer comes from computing in FP16."""

import re

import pytest
import torch
from recorded_steps import Layers, Net, batch, error_by, record_steps, weighed
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.detection import bf16_findings, find_operations
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.plan import PrecisionPlan


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


def cosines(z):
    return torch.cos(z * 3000).abs() * 2


def variance(z):
    h = z + 30
    return (h * h).mean(-1) - h.mean(-1) ** 2


def slope(step):
    """The difference quotient of a network."""

    def quotient(model, x):
        near, far = (model.body(torch.tanh(model.first(place))) for place in (x, x + step))
        return (far - near) / step

    torch.manual_seed(0)
    return Layers(quotient, first=nn.Linear(16, 16), body=nn.Linear(16, 16))


class Tiny(Net):
    """Factors of some size, whose product is brought back to an ordinary one."""

    def __init__(self, size) -> None:
        super().__init__(lambda x: torch.tanh(x / size))
        with torch.no_grad():
            self.body.weight.mul_(size)
            self.body.bias.mul_(size)


class OfData(nn.Module):
    """A layer of two coordinates, and batches that lie around one place."""

    def __init__(self, spread=1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(2, 16)
        generator = torch.Generator().manual_seed(3)
        self.x = torch.tensor([48.85, 2.35]) + spread * torch.randn(64, 2, generator=generator)

    def forward(self, x):
        return self.body(x)


def determinant(x):
    return torch.linalg.slogdet(x.view(8, 4, 4))[1]


def powers(x):
    return torch.linalg.matrix_power(x.view(-1, 4, 4), 3).sum((1, 2))


def spectrum(length):
    return lambda x: torch.fft.rfft(x[:, :length]).abs().sum(1)


LACKING = "no-half-kernel"
ADDMM = "addmm body"
COARSE = 3e-3  # of a slope: what comes before its difference may stay in FP16, at a loss of digits
HERE = "_ at .*test_precision_rules.py.* into a new tensor"
# name: a model and what it is made of; the code that the policy does not cover; operations and their
# modules; what the reason says
CASES = {
    "a square in place": (Outside, squared_in_place, "overflow", {"mul "}, HERE),
    "a mask in place": (Outside, masked_in_place, "mask-fill", {"mm "}, HERE),
    "a sum in place": (Outside, summed_in_place, "overflow", {"relu "}, HERE),
    "one of a chain is enough": (Net, cosines, "imprecise", {ADDMM}, ""),
    "a difference, not where both sides come from": (Net, variance, "cancellation", {"add head"}, ""),
    "a slope": (slope, COARSE, "cancellation", {ADDMM}, ""),
    "a slope below the rounding of every layer": (
        slope, 1e-4, "cancellation", {"addmm first", ADDMM}, "",
    ),
    "factors that vanish": (Tiny, 1e-9, "underflow", {ADDMM}, ""),
    "small factors": (Tiny, 1e-4, "", set(), ""),
    "data that differ less than their rounding": (OfData, 0.005, "indistinct", {ADDMM}, ""),
    "data that differ": (OfData, 5.0, "", set(), ""),
    "a determinant": (Net, determinant, LACKING, {"_linalg_slogdet head"}, "on CUDA"),
    "a determinant in FP32": (Net, lambda x: determinant(x.float()), "", set(), ""),
    "a function by its own name": (
        Net, lambda x: torch.quantile(x, 0.5, dim=1), LACKING, {"quantile head"},
        "torch.quantile refuses FP16 on CUDA",
    ),
    "another": (
        Net, powers, LACKING, {"linalg_matrix_power head"},
        "torch.linalg_matrix_power refuses FP16 on CUDA",
    ),
    "a Fourier transform of 16": (Net, spectrum(16), "", set(), ""),
    "a Fourier transform of 12": (
        Net, spectrum(12), LACKING, {"_fft_r2c head"}, "that are powers of two, not 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_blamed_is_wrong_and_the_plan_mends_it(case, tmp_path):
    kind, part, code, places, words = CASES[case]
    model = kind(part)
    x = getattr(model, "x", batch())
    run = record_steps(tmp_path / "run", model, lambda m, _: weighed(m(x)), operations=1)
    analysis = mpdiag.analyze(run)
    blamed = [f for f in analysis.operations if not f.covered]
    assert {f.code for f in blamed} == {code} - {""}
    assert {f"{f.op} {f.module}" for f in blamed} == places
    assert all(re.search(words, f"{f.subject}: {f.reason}; {f.fix}") for f in blamed)
    assert analysis.verdict.level == "expected"

    def centred(m):
        output = m(x)
        return output - output.float().mean(0) if kind is OfData else output

    bare = error_by(model, PrecisionPlan(loss_scale=analysis.plan.loss_scale), centred)
    assert (bare > 0.05) == (code not in ("", LACKING)), bare
    assert error_by(model, analysis.plan, centred) < (0.2 if part == COARSE else 0.05)


def test_weight_gradients_of_a_product_in_fp32_limit_no_scale(tmp_path):
    x = 5000 + torch.arange(64.0)[:, None] * torch.ones(1, 2)

    def loss(model, _step):
        return torch.sin(model(x)).square().sum()

    run = record_steps(tmp_path / "run", OfData(), loss, operations=1)
    analysis = mpdiag.analyze(run)
    assert {(f.op, f.module) for f in analysis.operations if not f.covered} == {("addmm", "body")}
    h = analysis.layers.of_kind("weight_grad").histograms
    assert h.absmax.max() > 65504
    assert (
        analysis.loss_scale.limiting_layer is None
    )  # its output is FP32, too, and all that reads it
    assert analysis.plan.loss_scale.reason == "every recorded gradient stays FP32, none is FP16"
    assert not analysis.plan.loss_scale.needed
    streamed = RunStatistics(run.pieces)
    held = RunStatistics.of(run.records)
    for statistics in (streamed, held):
        rest = statistics.without_gradients({"body.weight", "body.bias"})
        assert len(rest.layers().of_kind("weight_grad")) == 0
        assert rest.step_maxima()[1].max() == (
            statistics.layers().of_kind("activation_grad").histograms.absmax.max()
        )


def test_a_target_far_from_zero_asks_for_an_fp32_output(tmp_path):
    def found(name, target):
        def loss(m, _step):
            return F.mse_loss(m(batch()), target)

        run = record_steps(tmp_path / name, Net(nn.Identity()), loss, operations=1)
        return [
            [f for f in find_operations(run.operations(), fmt) if not f.covered]
            for fmt in (FP16, BF16)
        ]

    (far,) = found("far", 300 + 0.1 * batch())[0]
    assert (far.code, far.op, far.module) == ("indistinct", "addmm", "body")
    assert far.evidence["noise"] > 0.1
    assert found("near", batch()) == [[], []]


def test_bf16_has_its_own_judgement(tmp_path):
    model = OfData(0.5)
    run = record_steps(tmp_path / "run", model, lambda m, _: weighed(m(m.x)), operations=1)
    assert find_operations(run.operations(), FP16) == ()
    assert {f.code for f in find_operations(run.operations(), BF16)} == {"indistinct"}
    (finding,) = bf16_findings(run.operations(), FP16)
    assert (finding.code, finding.severity) == ("bf16-precision", "info")
    assert "1 operation" in finding.message
    assert not list(bf16_findings(run.operations(), BF16))


def test_bf16_takes_a_fourier_transform_of_no_length(tmp_path):
    operations = record_steps(tmp_path / "run", Net(spectrum(16)), operations=1).operations()
    assert {f.aten for f in find_operations(operations, BF16)} == {"_fft_r2c"}


def test_the_product_of_a_sparse_matrix_gets_fp32_on_both_sides(tmp_path):
    mixing = torch.eye(8).to_sparse()

    def mixed(x):
        return torch.sparse.mm(mixing, x).sum(1)

    run = record_steps(tmp_path / "run", Net(mixed), operations=1)
    (finding,) = find_operations(run.operations(), FP16)
    assert (finding.code, finding.op) == ("no-half-kernel", "_sparse_addmm")
    assert "needs operands of one dtype, and autocast casts neither" in finding.reason
    plan = mpdiag.analyze(run).plan
    assert {c.op for c in plan.fp32_operations} == {"_sparse_addmm"}
    assert error_by(Net(mixed), plan) < 0.05

    run = record_steps(tmp_path / "wide", Net(lambda x: mixed(x.float())), operations=1)
    assert find_operations(run.operations(), FP16) == ()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_number_added_before_a_logarithm_counts_as_far_as_the_step_feels_it(tmp_path, wrong):
    """Where p is 1 in BF16 its slope is 0, too: only who is sure and wrong reads log(1e-6) for more."""

    def entropy(model, step):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        z = model.body(x)[:, 0]
        y = ((z > 0) != wrong).float()
        p = torch.sigmoid(12 * z)
        return -(y * torch.log(p + 1e-6) + (1 - y) * torch.log(1 - p + 1e-6)).mean()

    run = record_steps(tmp_path / "run", Net(nn.Identity()), entropy, 12, rate=1e-3, operations=2)
    found = [f for f in find_operations(run.operations(), BF16) if not f.covered]
    assert [f.code for f in found] == (["vanishing"] if wrong else [])
    assert all("log reads 1e-06 instead" in f.without for f in found)


@pytest.mark.parametrize(("largest", "needed"), [(0.945, False), (0.9995, True)])
def test_a_bound_that_becomes_one_counts_where_values_come_to_it(tmp_path, largest, needed):
    """The cosines of ArcFace, which stay below 0.95, and those of equal directions."""

    def angles(x):
        return torch.acos((largest * x / x.abs().max()).clamp(-1 + 1e-7, 1 - 1e-7))

    found = find_operations(record_steps(tmp_path, Net(angles), operations=1).operations(), BF16)
    assert [f.code for f in found if not f.covered and f.code == "diverging"] == (
        ["diverging"] if needed else []
    )


@pytest.mark.parametrize("logits", [False, True])
def test_a_loss_that_autocast_refuses_is_told(tmp_path, logits):
    def loss(m, _step):
        half = torch.full((8, 16), 0.5)
        if logits:
            return F.binary_cross_entropy_with_logits(m(batch()), half)
        return F.binary_cross_entropy(m(batch()).sigmoid(), half)

    run = record_steps(tmp_path / "run", Net(nn.Identity()), loss, operations=1)
    told = [f for f in mpdiag.analyze(run).findings if f.code == "refused-by-autocast"]
    assert len(told) == (not logits)
    for finding in told:
        assert "on CUDA, binary_cross_entropy raises an error under autocast" in finding.message
        assert finding.evidence["where"]


@pytest.mark.parametrize("name", ["dcgan", "gpt", "language_model", "speech", "vgg", "vit"])
def test_an_ordinary_network_is_told_nothing(name, root):
    run = mpdiag.open_run(root / "sample_runs" / name)
    operations = run.operations()
    assert operations
    scale = mpdiag.analyze(run).loss_scale.plan.recommended
    for target in (FP16, BF16):
        assert [f for f in find_operations(operations, target, scale) if not f.covered] == []
