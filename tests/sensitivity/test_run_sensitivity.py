"""Measured sensitivities: what stands in the file is what the measurement gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.runs.results import by_weight, read_sensitivities
from mpdiag.sensitivity.measurement import measure


class Squares(nn.Module):
    """Squares of some hundreds, whose sum leaves FP16's range."""

    def forward(self, x):
        return (300 * x).pow(2).sum(-1).sqrt()


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Squares())
    x = torch.randn(6, 4)
    return model, lambda: model(x).mean()


def test_the_overflowing_operation_is_on_top(tmp_path):
    model, step = training()
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = mpdiag.measure_sensitivity(model, step, tmp_path / "run", scale=8.0)
    lost = [row for row in by_weight(found.operations) if not row.finite]
    assert lost == by_weight(found.operations)[: len(lost)]
    assert ("2", "pow", None) in [(row.module, row.op, row.loss_error) for row in lost]
    assert "linear" not in {row.op for row in lost}
    assert read_sensitivities(tmp_path / "run") == found
    assert (found.format, found.scale) == ("fp16", 8.0)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())


def test_the_numbers_are_those_of_the_measurement():
    model, step = training()
    stored = {(r.module, r.op): r for r in mpdiag.measure_sensitivity(model, step).operations}
    for row in measure(model, step):
        own = stored.pop((row.module, row.op))
        if own.finite:
            assert own.gradient_error == row.gradient_error
            assert own.estimate is not None
            assert own.estimate > 0
    assert not stored


def test_another_format_is_less_exact():
    model, step = training()
    errors = {}
    for fmt in ("fp16", "fp8_e5m2"):
        rows = mpdiag.measure_sensitivity(model, step, fmt=fmt).operations
        errors[fmt] = next(r.gradient_error for r in rows if (r.module, r.op) == ("0", "linear"))
    assert errors["fp8_e5m2"] > 10 * errors["fp16"] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: None,
        lambda loss: 1.0,
        lambda loss: loss.detach(),
        lambda loss: torch.stack([loss, loss]),
    ],
)
def test_a_step_without_a_loss_is_refused(change):
    model, step = training()
    with pytest.raises(UsageError, match="must return its loss"):
        mpdiag.measure_sensitivity(model, lambda: change(step()))


def test_a_model_that_trains_nothing_is_refused():
    model, _ = training()
    x = torch.randn(6, 4, requires_grad=True)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mpdiag.measure_sensitivity(model, lambda: model(x).mean())


def test_an_unknown_format_is_refused():
    model, step = training()
    with pytest.raises(ValueError, match="no number format"):
        mpdiag.measure_sensitivity(model, step, fmt="fp12")
