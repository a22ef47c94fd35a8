"""What rounding does to the loss, beside what a step does to it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from recorded_steps import record_steps
from torch import nn

import mpdiag
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.analysis.operations.loss_change import NO_CURVE, LossCurve, least_product, loss_curve
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram


class Offset(nn.Module):
    """Values near 500."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)
        nn.init.constant_(self.body.bias, 500.0)

    def forward(self, x):
        return self.body(x)[:, 0]


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


def starting_at_the_solution(model):
    with torch.no_grad():
        model.body.weight.fill_(0.1)
    return model


def test_an_error_below_the_noise_of_the_data_takes_no_operation_out_of_fp16(tmp_path):
    model = starting_at_the_solution(Offset())
    run = record_steps(tmp_path / "run", model, residual(1.0), 11, rate=0.02)
    differences = [op for op in run.operations() if op.op == "sub"]
    assert all(op.facts["error_fp16"] > 0.05 for op in differences)
    assert not flagged(run, "cancellation")


def test_the_same_error_counts_where_the_fit_is_exact(tmp_path):
    model = starting_at_the_solution(Offset())
    run = record_steps(tmp_path / "run", model, residual(0.003), 11, rate=0.001)
    assert flagged(run, "cancellation") == {"addmm"}


def test_without_losses_or_gradients_an_error_counts_as_it_is(tmp_path):
    model = starting_at_the_solution(Offset())
    run = record_steps(tmp_path / "run", model, residual(1.0), 11, rate=0.02)
    plain = [  # as recordings were before the effect on gradients was measured
        replace(op, facts={k: v for k, v in op.facts.items() if not k.startswith("gradient_error")})
        for op in run.operations()
    ]
    found = find_operations(plain, FP16, curve=NO_CURVE)
    assert "cancellation" in {f.code for f in found}
    assert not find_operations(run.operations(), FP16, curve=NO_CURVE)  # gradients hardly change


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


class Silence(nn.Module):
    """Rows divided by their largest value; a row of silence is divided by the epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.relu(self.filters(x))
        return self.head(h / (h.amax(-1, keepdim=True) + 1e-8))


def test_a_gradient_beyond_the_range_that_relu_drops_is_no_overflow(tmp_path):
    torch.manual_seed(0)

    def loss(model, step):
        x = torch.randn(16, 4)
        x[::4] = 0
        return model(x).square().sum()

    run = record_steps(tmp_path / "run", Silence(), loss, 11, rate=1e-4)
    reached = max(t.absmax for op in run.operations() if op.node for t in op.outputs)
    assert reached > FP16.max
    assert not flagged(run, "gradient-overflow")


class Size(nn.Module):
    """Rows divided by their root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 1)

    def forward(self, x):
        h = self.mix(x)
        return self.head(h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-12))


def test_what_follows_an_operation_that_another_step_puts_into_fp32_is_not_named(tmp_path):
    torch.manual_seed(0)

    def loss(model, step):
        small = 1e-8 if step == 0 else 3e-5
        return model(small * torch.randn(16, 4)).square().sum()

    run = record_steps(tmp_path / "run", Size(), loss, 11, rate=1e-4)
    assert flagged(run, "vanishing") == {"mm"}


def test_a_curve_of_a_run_without_a_log_is_empty(tmp_path):
    run = record_steps(tmp_path / "run", Offset(), residual(1.0), rate=0.02)
    assert len(loss_curve(run).losses) == 1
    (run.folder / "training.jsonl").unlink()
    assert loss_curve(mpdiag.open_run(run.folder)) == NO_CURVE
