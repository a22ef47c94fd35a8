"""What the measured effect of rounding an operation on a step's gradients decides."""

from dataclasses import replace

import pytest
import torch
from analysis.operations.test_rules import rotated
from recorded_steps import Layers, Net, record_steps
from torch import nn

import mpdiag
from mpdiag.analysis.operations import gradient_rules
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.analysis.operations.loss_change import NO_CURVE, LossCurve, loss_curve
from mpdiag.numerics.formats import BF16, FP16


def solved(model, batch):
    """Weights of points, by which a cubic through them is found: normal equations by a product."""
    rows, right, look = batch
    weighted = (rows * torch.sigmoid(model.trust(look))).transpose(1, 2)
    normal = (weighted @ rows).float() + 1e-6 * torch.eye(4)
    answer = (weighted @ right[..., None]).float()
    return torch.linalg.solve(normal, answer).squeeze(-1)


def batches(step):
    g = torch.Generator().manual_seed(step)
    rows = torch.rand(8, 24, generator=g)[..., None] ** torch.arange(4)
    true = torch.randn(8, 4, generator=g)
    noise = 0.01 * torch.randn(8, 24, generator=g)
    look = torch.randn(8, 24, 3, generator=g)
    return (rows, (rows @ true[..., None]).squeeze(-1) + noise, look), true


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def loss(model, step):
        batch, true = batches(step)
        return (model(batch) - true).square().mean()

    folder = tmp_path_factory.mktemp("solved") / "run"
    torch.manual_seed(0)
    model = Layers(solved, trust=nn.Linear(3, 1))
    return record_steps(folder, model, loss, 12, torch.optim.Adam, 1e-2, budget=None)


def named(operations, target=FP16, curve=NO_CURVE, code="gradient-error"):
    found = find_operations(operations, target, curve=curve)
    return {f.op for f in found if f.code == code and not f.covered}


def with_effect(operations, error, change, at=10, op="bmm"):
    """The same recording, had the effect of an operation been another."""
    facts = {"gradient_error_fp16": error, "loss_change_fp16": change}
    return [
        replace(o, facts={**o.facts, **facts}) if (o.op, o.step) == (op, at) and not o.node else o
        for o in operations
    ]


def test_products_before_an_inverse_are_named(run):
    operations, curve = run.operations(), loss_curve(run)
    assert named(operations, curve=curve) == {"bmm"}
    assert named(operations, BF16, curve=curve) == {"bmm"}
    analysis = mpdiag.analyze(run)
    assert ("bmm", "") in {(c.op, c.module) for c in analysis.plan.fp32_operations}
    told = [f for f in analysis.findings if f.code.startswith("operation-")]
    assert len(told) == len({f.evidence["line"] for f in told})
    finding = next(f for f in told if f.code == "operation-gradient-error")
    assert finding.severity == "warning"
    assert "changes the gradients by" in finding.message
    assert "times as much as a training step does" in finding.message


def test_it_takes_gradients_the_movement_of_the_loss_and_the_loss_at_the_start(run):
    operations, curve = run.operations(), loss_curve(run)
    moves, start = curve.movement(10), curve.start
    large = max(
        3 * gradient_rules.MOVES * moves,
        3 * gradient_rules.TOGETHER * start / gradient_rules.GRADIENT,
    )
    assert named(with_effect(operations, 0.4, large), curve=curve) == {"bmm"}
    assert not named(with_effect(operations, 0.2, large), curve=curve)
    assert not named(with_effect(operations, 5.0, 0.9 * gradient_rules.MOVES * moves), curve=curve)
    steady = LossCurve({step: 1.0 - 0.001 * step for step in range(12)})
    for change, left in ((0.3, {"bmm"}), (0.2, set())):  # times 0.4 beside ``TOGETHER``
        assert named(with_effect(operations, 0.4, change), curve=steady) == left
    far = LossCurve({**curve.losses, 0: 1e3 * large, 1: 1e3 * large, 2: 1e3 * large})
    assert not named(with_effect(operations, 5.0, large), curve=far)
    assert not named(operations)  # no losses, no answer
    plain = [
        replace(o, facts={k: v for k, v in o.facts.items() if not k.startswith(("grad", "loss_"))})
        for o in operations
    ]
    assert not named(plain, curve=curve)  # a recording without the measurement


def test_a_product_whose_rounding_breaks_the_step_is_named(run):
    broken = [
        replace(o, facts={"step_breaks_fp16": 1.0}) if o.step == 10 and not o.node else o
        for o in run.operations()
    ]
    assert named(broken, curve=loss_curve(run)) == {"bmm", "addmm"}
    (text,) = {
        f.reason
        for f in find_operations(broken, FP16, curve=loss_curve(run))
        if f.code == "gradient-error"
    }
    assert "makes the loss or a gradient infinite or NaN" in text


def test_the_last_step_that_was_measured_decides(run):
    operations, curve = run.operations(), loss_curve(run)
    early = [
        replace(o, step=5, index=o.index) if o.step == 0 else o
        for o in with_effect(operations, 50.0, 1e3 * curve.start, at=0)
    ]
    assert named(with_effect(early, 0.01, 0.0), curve=curve) == set()


@pytest.mark.parametrize(
    ("steps", "harms", "found"),
    [
        ((100, 125), 100, {"bmm"}),  # batches differ: the one after it is harmless
        ((100, 125), 125, {"bmm"}),
        ((60, 125), 60, set()),  # what training has grown out of
        ((60, 80), 60, set()),
        ((60, 80), 80, {"bmm"}),
    ],
)
def test_any_step_decides_once_training_has_settled(run, steps, harms, found):
    """The recording's step 10, as if it were two later steps."""
    curve = LossCurve({k: 1.0 - 0.001 * k for k in range(200)})
    ten = [o for o in with_effect(run.operations(), 0.01, 0.0) if o.step == 10]
    later = [replace(o, step=step) for step in steps for o in ten]
    assert named(with_effect(later, 50.0, 10.0, at=harms), curve=curve) == found


def test_the_verdict_says_in_which_steps_gradients_were_looked_at(run, monkeypatch):
    assert gradient_rules.run_again(run.operations(), FP16) == (10,)
    said = mpdiag.analyze(run).verdict.not_examined
    assert "the effect of rounding on gradients, except in step 10" in said
    monkeypatch.setattr(gradient_rules, "effect", lambda *_: None)
    said = mpdiag.analyze(run).verdict.not_examined
    (clause,) = [one for one in said if "run again" in one]
    assert clause == "the effect of rounding on gradients (no step was run again)"
    assert gradient_rules.run_again([], FP16) is None  # another clause says that there are none


def test_a_suspicion_of_what_does_no_harm_is_dropped(tmp_path):
    def loss(model, _step):
        return model(torch.randn(8, 16)).square().mean()

    operations = record_steps(tmp_path / "run", Net(rotated), loss).operations()
    assert named(operations, code="imprecise") == {"einsum"}  # nothing was measured
    inside = {o.op for o in operations if o.function == "einsum"}
    curve = LossCurve({0: 1.0, 1: 0.9})
    for error, change, left in (
        (0.5, 0.0, {"einsum"}),
        (0.01, 0.0, set()),
        (0.01, 5.0, {"einsum"}),
    ):
        measured = operations
        for op in inside:
            measured = with_effect(measured, error, change, at=0, op=op)
        assert named(measured, code="imprecise", curve=curve) == left


def residual(count=12):
    """Blocks without normalization, which begin as almost nothing beside what they are added to."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 32), nn.Linear(32, 1)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(count)
    )
    for block in blocks:
        nn.init.normal_(block[2].weight, 0, 1e-4)
        nn.init.zeros_(block[2].bias)

    def forward(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = x + block(x)
        return model.last(x)

    return Layers(forward, first=first, blocks=blocks, last=last)


def test_all_of_many_blocks_are_measured_and_none_is_suspected(tmp_path):
    def loss(model, step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    run = record_steps(tmp_path / "run", residual(), loss, 12, rate=1e-3, budget=None)
    operations, curve = run.operations(), loss_curve(run)
    measured = {o.module for o in operations if "gradient_error_fp16" in o.facts}
    assert {f"blocks.{i}.2" for i in range(12)} <= measured
    assert not named(operations, code="swallowed", curve=curve)
    unmeasured = [
        replace(o, facts={k: v for k, v in o.facts.items() if k[:4] != "grad"}) for o in operations
    ]
    assert named(unmeasured, code="swallowed", curve=curve)
