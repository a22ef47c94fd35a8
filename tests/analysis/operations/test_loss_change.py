"""What rounding does to the loss, beside what a step does to it."""

import itertools
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from recorded_steps import Layers, record_steps
from torch import nn

import mpdiag
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.analysis.operations.gradient_rules import effect
from mpdiag.analysis.operations.graph import split
from mpdiag.analysis.operations.loss_change import NO_CURVE, LossCurve, least_product, loss_curve
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram


def offset():
    """Values near 500, from the weights that the data were made with."""
    model = Layers(lambda m, x: m.body(x)[:, 0], body=nn.Linear(3, 1))
    nn.init.constant_(model.body.bias, 500.0)
    nn.init.constant_(model.body.weight, 0.1)
    return model


def residual(noise):
    def loss(model, step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 3, generator=generator)
        target = 500 + x.sum(1) * 0.1 + noise * torch.randn(64, generator=generator)
        return (model(x) - target).square().mean()

    return loss


def flagged(run, code):
    found = find_operations(run.operations(), FP16, curve=loss_curve(run))
    return {f.op for f in found if f.code == code and not f.covered}


@pytest.mark.parametrize(
    ("noise", "rate", "named"),
    [(1.0, 0.02, set()), (0.003, 0.001, {"addmm"})],
    ids=["an error below the noise of the data", "an exact fit"],
)
def test_an_error_counts_beside_what_the_fit_leaves(tmp_path, noise, rate, named):
    run = record_steps(tmp_path / "run", offset(), residual(noise), 11, rate=rate)
    operations = run.operations()
    assert all(op.facts["error_fp16"] > 0.05 for op in operations if op.op == "sub")
    assert flagged(run, "cancellation") == named
    if not named:  # without losses or gradients an error counts as it is
        plain = [
            replace(op, facts={k: v for k, v in op.facts.items() if k[:14] != "gradient_error"})
            for op in operations
        ]
        found = find_operations(plain, FP16, curve=NO_CURVE)
        assert "cancellation" in {f.code for f in found}
        assert not find_operations(operations, FP16, curve=NO_CURVE)  # gradients hardly change


def test_the_least_product_is_a_lower_bound_of_every_pairing():
    gradient = torch.tensor([0.0, 1e-3, 0.02, 0.7, 3.0])
    values = torch.tensor([0.0, 1e-9, 0.3, 5.0, 3000.0])
    spacing = {0.0: 0.0, 0.3: 2.0**-12, 5.0: 2.0**-8, 3000.0: 2.0}
    errors = [spacing[v] ** 2 / 12 if v in spacing else v * v for v in values.tolist()]
    errors[2] = (2.0**-12) ** 2 / 12  # 0.3 as FP32 has it
    least = min(
        sum(float(g) ** 2 * e for g, e in zip(gradient, order, strict=True))
        for order in itertools.permutations(errors)
    )
    found = least_product(
        ExponentHistogram.of(gradient.numpy()), ExponentHistogram.of(values.numpy()), FP16
    )
    assert found == pytest.approx(least, rel=0.02)


def test_a_curve_tells_its_size_and_how_far_it_moves():
    curve = LossCurve({0: 4.0, 1: -2.0, 2: -2.5, 40: 1.0})
    assert curve.size(1) == 2.0
    assert curve.size(3) is None
    assert curve.movement(0) == pytest.approx((6.0 + 0.5) / 2)
    assert curve.movement(40) is None
    assert LossCurve({0: 1.0, 1: 1.0, 2: 1.0}).movement(1) is None


def silence(m, x):
    """Rows divided by their largest value; a row of silence is divided by the epsilon."""
    h = torch.relu(m.filters(x))
    return m.head(h / (h.amax(-1, keepdim=True) + 1e-8))


def size(m, x):
    """Rows divided by their root mean square."""
    h = m.filters(x)
    return m.head(h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-12))


def recorded(folder, call, batch_of):
    torch.manual_seed(0)
    model = Layers(call, filters=nn.Linear(4, 6, bias=False), head=nn.Linear(6, 1))
    return record_steps(
        folder, model, lambda m, step: m(batch_of(step)).square().sum(), 11, rate=1e-4
    )


def test_a_gradient_beyond_the_range_that_relu_drops_is_no_overflow(tmp_path):
    def batch(_step):
        return torch.randn(16, 4) * (torch.arange(16) % 4 > 0)[:, None]

    run = recorded(tmp_path / "run", silence, batch)
    reached = max(t.absmax for op in run.operations() if op.node for t in op.outputs)
    assert reached > FP16.max
    assert not flagged(run, "gradient-overflow")


def test_the_lowest_number_that_a_backward_pass_fills_with_is_no_overflow(tmp_path):
    def risks(m, x):
        h = m.head(m.filters(x)).squeeze(-1)
        return h - h.logcumsumexp(0)

    run = recorded(tmp_path / "run", risks, lambda _step: torch.randn(16, 4))
    reached = max(t.absmax for op in run.operations() if op.node for t in op.outputs)
    assert reached > FP16.max  # in FP16 it is FP16's lowest number
    assert not flagged(run, "gradient-overflow")


def test_what_follows_an_operation_that_another_step_puts_into_fp32_is_not_named(tmp_path):
    def batch(step):
        return (3e-5 if step else 1e-8) * torch.randn(16, 4)

    assert flagged(recorded(tmp_path / "run", size, batch), "vanishing") == {"mm"}


def test_a_loss_scale_changes_nothing_that_is_said_of_the_loss(tmp_path):
    x = torch.randn(8, 3)
    graphs = {}
    for scale in (1.0, 2.0**14):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        exact = deepcopy(model).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        with mpdiag.record(model, optimizer, folder := tmp_path / f"{scale}", budget=None):
            for _ in range(11):
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        run = mpdiag.open_run(folder)
        graphs[scale] = split(run.operations(), loss_curve(run))
    middle = exact[0](x.double()).detach().requires_grad_()
    exact[2](exact[1](middle)).square().mean().backward()
    effects = []
    for first, last in graphs.values():
        op = next(op for op in first.operations if op.op == "addmm")
        size = 1e-3 * middle.grad.norm().item() / first.curve.movement(0)
        assert first.loss_change.of_error(op, 1e-3)[0] == pytest.approx(size, rel=0.05)
        effects.append([effect(op, FP16) for op in last.operations if op.op == "addmm"])
    assert effects[0][0] == pytest.approx(effects[1][0])


def test_a_curve_of_a_run_without_a_log_is_empty(tmp_path):
    run = record_steps(tmp_path / "run", offset(), residual(1.0), rate=0.02)
    assert len(loss_curve(run).losses) == 1
    (run.folder / "training.jsonl").unlink()
    assert loss_curve(mpdiag.open_run(run.folder)) == NO_CURVE


def test_the_share_of_the_fall_that_follows_a_step():
    curve = LossCurve({k: 10.0 - 0.1 * k for k in range(101)})
    assert curve.fall_after(2) == pytest.approx((100 - 4.5 - 3.5) / (100 - 4.5 - 2))
    assert curve.fall_after(50) == pytest.approx(45.5 / 93.5)
    assert curve.fall_after(500) is None
    assert LossCurve({0: 1.0, 1: 1.0}).fall_after(0) is None
    assert NO_CURVE.fall_after(0) is None
