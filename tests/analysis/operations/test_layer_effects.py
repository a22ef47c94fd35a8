"""What rounding a layer did to a recorded step, by the operations that make and read its output."""

from dataclasses import replace

import pytest
import torch
from recorded_steps import Layers, record_steps
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.layer_effects import LayerEvidence, Rounded, layer_evidence
from mpdiag.analysis.operations.loss_change import LossCurve, loss_curve
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.plan import Fp32Choice


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waves") / "run"
    torch.manual_seed(0)
    model = Layers(  # fast waves of a place: their angles bear no rounding, what follows does
        lambda m, x: m.out(m.body(torch.sin(m.angles(x)))),
        angles=nn.Linear(1, 16),
        body=nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        out=nn.Linear(16, 1),
    )
    nn.init.normal_(model.angles.weight, std=300.0)
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = torch.sin(model.angles(x)) @ torch.randn(16, 1)

    def loss(model, _step):
        return (model(x) - y).square().mean()

    return record_steps(folder, model, loss, 14, torch.optim.Adam, 1e-3, budget=None)


@pytest.fixture(scope="module")
def evidence(run):
    kept = mpdiag.analyze(run).plan.fp32_operations
    return layer_evidence(run.operations(), kept, loss_curve(run))


def loss(evidence, name, target=FP8_E4M3):
    return sum(e.loss for e in evidence.of(name, target))


def test_the_effect_is_that_of_the_layer_and_not_of_another(evidence):
    assert evidence.step() == 10
    assert loss(evidence, "angles") > 5 * loss(evidence, "out")
    assert loss(evidence, "angles") > loss(evidence, "angles", BF16)


def test_what_moves_values_or_holds_layers_has_the_effect_of_what_it_passes_on(evidence):
    assert evidence.of("body", FP8_E4M3) == evidence.of("body.1", FP8_E4M3)
    assert evidence.of("", FP8_E4M3) == evidence.of("out", FP8_E4M3)
    # No effect is known of a format that was not measured.
    assert evidence.of("out", FP8_E5M2) is None
    assert evidence.of("nowhere", FP8_E4M3) is None
    assert LayerEvidence().of("out", FP8_E4M3) is None


def test_no_layer_is_advised_what_its_step_does_not_bear(run, evidence):
    formats = mpdiag.analyze(run).plan.layer_formats
    advised = {a.name: a.format for a in formats if a.kind == "activation"}
    assert not advised["angles"].startswith("fp8")
    assert all(f == "fp32" for name, f in advised.items() if evidence.keeper(name))


def test_a_recording_without_the_measurement_shows_no_effect(run):
    older = [
        replace(op, facts={k: v for k, v in op.facts.items() if not k.endswith("fp8_e4m3")})
        for op in run.operations()
    ]
    evidence = layer_evidence(older, (), loss_curve(run))
    assert evidence.of("out", FP8_E4M3) is None
    assert evidence.of("out", BF16) is not None


def test_a_result_that_is_only_seen_in_another_shape_has_the_effect_of_its_product(tmp_path):
    """A product of three dimensions, which PyTorch folds to two and back."""
    wave = torch.linspace(50.0, 90.0, 6).repeat(2, 1)
    place = nn.Parameter(torch.full((4, 2), 0.5))
    model = Layers(lambda m, x: (x[:, None] * m.place) @ wave, place=place)
    x = torch.rand(8, 2, generator=torch.Generator().manual_seed(2))

    def far(model, _step):
        return (1 - torch.cos(model(x) - 3)).mean()

    run = record_steps(tmp_path / "run", model, far, 12, torch.optim.Adam, 1e-3, budget=None)
    views = [op for op in run.operations() if op.op == "_unsafe_view" and not op.node]
    assert views
    assert not any(fact.startswith("loss_change") for op in views for fact in op.facts)
    named = Fp32Choice("mm", "", "a test's", {})
    evidence = layer_evidence(run.operations(), (named,), loss_curve(run))
    assert evidence.keeper("") == "the plan keeps its mm in FP32"
    assert loss(evidence, "") > 0
    before = [  # recorders that took the view for an operation of its own
        replace(op, facts={**op.facts, "gradient_error_fp8_e4m3": 0.0, "loss_change_fp8_e4m3": 0.0})
        if op in views
        else op
        for op in run.operations()
    ]
    assert loss(layer_evidence(before, (), loss_curve(run)), "") > 0


def test_a_module_that_the_plan_keeps_whole_is_kept_with_all_that_it_holds(run):
    whole = Fp32Choice("Sequential", "body", "a test's", {"type": "Sequential"})
    evidence = layer_evidence(run.operations(), (whole,), loss_curve(run))
    assert evidence.keeper("body.0")
    assert evidence.keeper("body")
    assert not evidence.keeper("angles")


def cast_probabilities(model, x):
    z = model.body(x)
    p = F.softmax(z.float() * 20, -1)
    return p.to(z.dtype)


def test_a_layer_that_is_as_wide_as_what_the_plan_keeps_is_kept_too(tmp_path):
    """Of ``log(softmax(z).to(z.dtype))`` the plan keeps what computes z; the model puts out the cast."""
    torch.manual_seed(0)
    model = Layers(
        cast_probabilities,
        body=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    x, y = torch.randn(64, 16), torch.randint(0, 10, (64, 1))

    def loss(model, _step):
        return -model(x).log().clamp_min(-1000).gather(1, y).mean()

    run = record_steps(tmp_path / "run", model, loss, 14, torch.optim.Adam, 1e-3)
    plan = mpdiag.analyze(run).plan
    assert ("addmm", "body.2") in [(c.op, c.module) for c in plan.fp32_operations]
    formats = {(a.kind, a.name): a for a in plan.layer_formats}
    lost = run.operations()[6].outputs[0]  # the cast
    assert lost.absmin < 2.0**-25
    for kind in ("activation", "activation_grad"):
        assert formats[kind, ""].format == "fp32"
        assert formats[kind, ""].reason.startswith("it reads FP32 values")
        assert formats[kind, "body.2"].format == "fp32"
    assert formats["activation", "body.0"].format != "fp32"  # before it nothing is wide
    evidence = layer_evidence(run.operations(), (), loss_curve(run))
    assert not evidence.keeper("")
    covered = replace(mpdiag.analyze(run).operations[0], module="body.0", covered=True)
    told = layer_evidence(run.operations(), (), loss_curve(run), [covered])
    assert told.keeper("body.0") == "the plan keeps its addmm in FP32"


@pytest.mark.parametrize(
    ("losses", "measured"),
    [
        ({k: 1.0 - 0.01 * k for k in range(14)}, True),
        ({k: -0.2 * k for k in range(60)}, False),  # most of its fall comes later, below 0
        (
            {k: 2.0 * 0.5**k for k in range(60)},
            True,
        ),  # it has fallen; what is left counts by itself
        ({k: 1.0 + 0.01 * k for k in range(60)}, True),  # it does not fall
        ({}, True),
    ],
)
def test_fp8_is_known_where_most_of_the_fall_came_before(run, losses, measured):
    evidence = layer_evidence(run.operations(), (), LossCurve(losses))
    assert evidence.step() == 10
    assert (evidence.of("out", FP8_E4M3) is not None) == measured
    assert evidence.of("out", FP16) is not None


FINE = LossCurve({k: 4.0 * 0.7**k for k in range(40)})  # ends near 4e-6


@pytest.mark.parametrize(
    ("gradients", "change", "harms"),
    [(0.5, 1e-2, True), (0.1, 1e-2, False), (0.5, 1e-7, False)],
)
def test_sixteen_bits_must_leave_a_fine_fit(gradients, change, harms):
    class At(LayerEvidence):
        def step(self):
            return 30

    evidence = At(curve=FINE)
    assert evidence.harmful([(FP16, frozenset({Rounded(gradients, change)}))]) is harms


def bend(model, x):
    """The second derivative of a potential: tiny, behind slopes that are not."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("derivatives", [True, False])
def test_the_losss_own_gradients_are_told_from_those_of_its_derivatives(tmp_path, derivatives):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model = Layers(lambda m, x: m.body(x / 1000), body=body)
    x = (1000 * torch.rand(16, 1)).requires_grad_()

    def fit(model, _step):
        out = bend(model, x) - 1e-6 if derivatives else model(x)
        return out.square().mean()

    run = record_steps(tmp_path / "run", model, fit, 12, torch.optim.Adam, 1e-3, budget=None)
    evidence = layer_evidence(run.operations(), (), loss_curve(run))
    own = evidence.of_the_loss("body.1")
    if not derivatives:
        assert not own
        return
    (histogram,) = own
    assert float(histogram.absmax) < 1e-6
    (advice,) = (
        a
        for a in mpdiag.analyze(run).plan.layer_formats
        if (a.kind, a.name) == ("activation_grad", "body.1")
    )
    assert advice.evidence["absmax"] > 0.1  # of the first derivative's own backward pass
    assert advice.format != "fp16"
