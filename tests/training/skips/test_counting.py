"""A scale that still falls is searching; skips count where it stays, or where no scale helps."""

from __future__ import annotations

import pytest
import torch
from support import backoff, constant
from torch import nn

import mpdiag
from mpdiag.errors import TrainingDiverged


class Steep(nn.Module):
    """A finite loss whose gradient overflows FP16 above a scale of ``65504 / steepness``."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 1))
        self.steepness = steepness

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.w).float().sum() * self.steepness


def trainer(model, plan, **options):
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return mpdiag.MixedPrecision(model, optimizer, plan, **options)


def step(mp, model, value=1.0, **options):
    with mp.autocast():
        loss = model(torch.full((1, 1), value))
    return mp.step(loss, **options)


def test_a_dynamic_scale_that_falls_thirteen_times_is_no_end():
    """From torch's own first scale of 2^16 to 2^3."""
    model = Steep(7000.0)
    mp = trainer(model, backoff(2.0**16))
    results = [step(mp, model) for _ in range(16)]
    assert [r.skipped for r in results] == [True] * 13 + [False] * 3
    assert mp.loss_scale == 8.0


def test_skips_count_at_an_unchanged_scale():
    model = Steep(7000.0)
    mp = trainer(model, constant(1024.0))
    with pytest.raises(
        TrainingDiverged, match=r"8 steps in a row were skipped at a loss scale of"
    ) as e:
        for _ in range(8):
            step(mp, model)
    assert mp.steps == 8
    assert "choose a smaller scale, or one that falls" in str(e.value)


def test_a_scale_that_tolerates_as_many_skips_is_told_to_fall_sooner():
    model = Steep(7000.0)
    mp = trainer(model, backoff(1024.0, hysteresis=20))
    with pytest.raises(TrainingDiverged, match="let the scale fall sooner"):
        for _ in range(8):
            step(mp, model)


def test_a_floor_above_one_is_named_as_what_to_lower():
    model = Steep(7000.0)
    mp = trainer(model, backoff(64.0, min_scale=32.0))
    with pytest.raises(TrainingDiverged, match=r"floor of 32, where 8 .* allow smaller scales"):
        for _ in range(9):
            step(mp, model)
    assert mp.steps == 9


def test_a_loss_that_is_not_finite_counts_while_the_scale_falls():
    model = Steep(1.0)
    mp = trainer(model, backoff(2.0**16))
    for _ in range(7):
        assert step(mp, model, float("nan")).at_any_scale
    with pytest.raises(TrainingDiverged, match="8 steps in a row had a loss or a forward pass"):
        step(mp, model, float("nan"))
    assert mp.loss_scale == 2.0**8


def test_the_good_steps_of_one_optimizer_do_not_hide_another_that_never_steps():
    good, bad = Steep(1.0), Steep(7000.0)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-6) for m in (good, bad)]
    mp = mpdiag.MixedPrecision([good, bad], optimizers, constant(1024.0))

    def take(model, optimizer):
        with mp.autocast():
            loss = model(torch.ones(1, 1))
        return mp.step(loss, optimizer=optimizer)

    with pytest.raises(TrainingDiverged, match="8 steps in a row"):
        for _ in range(8):
            assert not take(good, optimizers[0]).skipped
            assert take(bad, optimizers[1]).skipped


def test_counts_go_on_from_a_checkpoint():
    model = Steep(7000.0)
    mp = trainer(model, constant(1024.0))
    for _ in range(7):
        step(mp, model)
    state = mp.state_dict()
    mp.close()
    mp = trainer(model, constant(1024.0))
    mp.load_state_dict(state)
    with pytest.raises(TrainingDiverged, match="8 steps in a row"):
        step(mp, model)
    older = {
        k: v for k, v in state.items() if k != "skips_in_a_row"
    }  # what is not known is not counted
    mp.load_state_dict(older)
    step(mp, model)
