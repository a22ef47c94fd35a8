"""Values that grow after operations were recorded, against what the training really computed then."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.layers import LargestValue, LargestValues
from mpdiag.analysis.operations.graph import StepGraph
from mpdiag.analysis.operations.growth import grown
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.runs.operations import Operation, TensorRecord


class Scheduled(nn.Module):
    """A model in which a gain grows from step 20 on; it notes what the dangerous values reach."""

    def __init__(self, read, *, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 16, bias=bias)
        self.points = nn.Parameter(torch.randn(4, 16))
        self.b = nn.Linear(16, 4)
        self.read = read
        self.gain = 1.0
        self.top = 0.0

    def forward(self, x):
        h = self.a(x * self.gain)
        value, out = self.read(h, self)
        self.top = max(self.top, float(value.detach().abs().max()))
        return self.b(out)


def squared(h, model):
    q = h * h
    return q, q / (1 + model.gain**2)


def offset_square(h, model):
    c = h - h[:, :1]
    q = c * c
    return q, q / (1 + model.gain**2)


def distances(h, model):
    q = h @ model.points.t()
    r = q * q
    return r, F.pad(r / (1 + model.gain**2), (0, 12))


def saturated(h, model):
    q = torch.tanh(h) * 200.0
    return q * q, q


def own_size(h, _model):
    q = h / h.norm(dim=1, keepdim=True)
    return q * q * 100, q


def big_neighbour(h, model):
    q = torch.full_like(h, 200.0) + h / model.gain
    return q * q, q


def analyzed(folder, model, steps, operations, gain=None):
    """The analysis of some steps of a model, whose gain follows from the step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    with mpdiag.record(model, optimizer, folder, every=5, operations=operations) as recorder:
        for step in range(steps):
            model.gain = gain(step) if gain else 1.0
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert recorder.failures == []
    return mpdiag.analyze(folder)


@pytest.mark.parametrize(
    ("read", "gain", "fails"),
    [
        (squared, 300.0, True),
        (offset_square, 600.0, True),
        (distances, 300.0, True),
        (squared, 20.0, False),  # it grows, and not so far
        (squared, 0.01, False),  # it shrinks
        (lambda h, model: (h + 1.0, h / model.gain), 300.0, False),  # nothing dangerous reads it
        (saturated, 300.0, False),
        (own_size, 300.0, False),
        (big_neighbour, 300.0, False),
    ],
)
def test_what_reads_a_layer_that_grows_late(tmp_path, read, gain, fails):
    model = Scheduled(read)
    analysis = analyzed(tmp_path / "run", model, 41, 2, lambda step: 1.0 if step < 20 else gain)
    assert (model.top >= 65520.0) == fails
    assert analysis.run.meta["operations"]["steps"] == [0, 10]
    assert any("after step 10" in said for said in analysis.verdict.not_examined)
    found = [f for f in analysis.operations if f.code == "overflow" and not f.covered]
    assert bool(found) == fails
    for one in found:
        assert one.evidence["grown"] == "a"
        assert one.evidence["grown_step"] >= 20
        assert one.evidence["absmax"] == pytest.approx(model.top, rel=0.5)
        assert {"step": 10}.items() <= one.evidence.items()
    if read is squared and fails:
        assert found[0].evidence["absmax"] == pytest.approx(model.top, rel=1e-5)
        assert [(c.op, c.module) for c in analysis.plan.fp32_operations] == [("mul", "")]


class Totals(nn.Module):
    """A layer, and the sum of the squares of all that it has said, which the model keeps itself."""

    def __init__(self, size, forget):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.size, self.forget = nn.Linear(8, 16), nn.Linear(16, 4), size, forget
        self.total = torch.zeros(16)

    def forward(self, x):
        h = self.a(x)
        more = self.size * (h * h).mean(0).detach()
        self.total = self.forget * self.total.to(h.dtype) + more
        return self.b(h / (1 + self.total).sqrt())


@pytest.mark.parametrize(
    ("size", "forget", "fails"),
    [
        (850.0, 1.0, True),
        (30.0, 1.0, False),
        (1500.0, 0.95, False),
    ],  # grows on, not so far, settles
)
def test_a_sum_that_grows_from_step_to_step_is_followed_to_the_end(tmp_path, size, forget, fails):
    """No layer puts it out; in step 125, the last one with operations, it is still in range."""
    model = Totals(size, forget)
    analysis = analyzed(tmp_path / "run", model, 151, 4)
    assert (float(model.total.max()) >= 65520.0) == fails
    assert analysis.run.meta["operations"]["steps"] == [0, 10, 100, 125]
    found = [f for f in analysis.operations if f.code == "overflow" and not f.covered]
    assert bool(found) == fails
    for one in found:
        assert one.evidence["absmax"] == pytest.approx(float(model.total.max()), rel=0.05)
        assert "by step 150 (estimated from how the result of the conversion grows)" in one.reason


def test_a_softmax_over_what_a_falling_temperature_divides_is_followed(tmp_path):
    """Its largest entry becomes infinite, not only those that it makes 0."""
    torch.manual_seed(0)
    model, top = nn.Linear(8, 4), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    with mpdiag.record(model, optimizer, tmp_path / "run", every=5, operations=4):
        for step in range(151):
            logits = model(x) / (1e-3 * 2.0 ** -(step / 25))
            top.append(float(logits.detach().abs().max()))
            optimizer.zero_grad()
            F.nll_loss(torch.softmax(logits, -1), y).backward()
            optimizer.step()
    assert top[125] < 60000 < 65520 <= top[-1]
    found = [f for f in mpdiag.analyze(tmp_path / "run").operations if not f.covered]
    assert "div" in {f.op for f in found if f.code == "overflow"}


def test_what_layers_showed_when_operations_were_recorded_is_no_growth(tmp_path):
    """The last recorded step decides, and a step that is larger than every other one adds nothing."""
    model = Scheduled(squared)
    analysis = analyzed(tmp_path / "run", model, 41, 2, lambda step: 300.0 if step == 10 else 1.0)
    (found,) = [f for f in analysis.operations if not f.covered]
    assert "grown" not in found.evidence
    assert found.evidence["absmax"] == pytest.approx(model.top, rel=1e-5)


def tensor(number, producer, top, argument="self", parameter=""):
    return TensorRecord(
        argument, number, producer, parameter, (4,), "float32", counted=True, first_exponent=0,
        counts=(4,), means=b"\x00", absmax=top, absmin=top,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "scalars", "other", "factor"),
    [
        ("mul", {}, "same", 640_000.0),
        ("mul", {"other": 3.0}, None, 800.0),
        ("square", {}, None, 640_000.0),
        ("pow", {"exponent": 3}, None, 800.0**3),
        ("pow", {"exponent": -1.0}, None, 1.0),
        ("sqrt", {}, None, 800.0**0.5),
        ("add", {}, 50_000.0, (800.0 * 100 + 50_000) / 50_000),
        ("cat", {}, 50_000.0, (800.0 * 100 + 50_000) / 50_000),
        ("div", {}, "same", 1.0),
        ("div", {}, 2.0, 800.0),
        ("sigmoid", {}, None, 1.0),  # what is not known grows by nothing
        ("gather", {}, None, 800.0),
    ],
)
def test_growth_of_a_result(op, scalars, other, factor):
    """A parameter of 100 is 800 times as large in step 30; what the operation gave was 50,000."""
    inputs = [tensor(1, -1, 100.0, parameter="w")]
    if other == "same":
        inputs.append(tensor(1, -1, 100.0, "other", parameter="w"))
    elif other is not None:
        inputs.append(tensor(2, -1, other, "other"))
    out = tensor(3, 0, 50_000.0, "out")
    only = Operation(
        7, 0, 0, op, "Tensor", "forward", "", "", -1, "", 0, "", "",
        scalars=scalars, inputs=tuple(inputs), outputs=(out,),
    )  # fmt: skip
    sizes = LargestValues({}, {"w": LargestValue(80_000.0, 30, {7: 100.0})})
    later = grown(StepGraph([only]), sizes, FP16)
    assert later.largest(out) == pytest.approx(50_000.0 * factor)
    assert (later.overflow(out, FP16) > 0) == (50_000.0 * factor >= 65520)
    assert grown(StepGraph([only]), sizes, BF16) is None  # its range is FP32's
    assert grown(StepGraph([only]), LargestValues(), FP16) is None
