"""How a loss-scaling trainer must behave: one test for each behaviour, named after what it protects.

The behaviours are those that the public suites of PyTorch, Apex, jmp, Keras, DeepSpeed, OpenSeq2Seq,
Lightning and accelerate describe, and those that users of these found missing.
"""

from __future__ import annotations

import pytest
import torch
from support import constant, wrapped
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import Backoff
from mpdiag.plan import LossScalePlan, PrecisionPlan

NAN = float("nan")


class Linear(nn.Module):
    """y = w · x, so that the gradient of w is the input, times what the loss is multiplied by."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def step(mp, model, x, **options):
    with mp.autocast():
        loss = model(x)
    return mp.step(loss, **options)


def test_gradients_whose_squares_leave_fp32_are_skipped():
    """Adam's second moment of a gradient of 1e25 is infinite, and its updates zero for ever."""
    model = Linear()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    mp = wrapped(model, optimizer=adam, level="O0")
    assert step(mp, model, torch.full((4,), 1e25)).skipped
    step(mp, model, torch.ones(4))
    assert torch.isfinite(adam.state[model.w]["exp_avg_sq"]).all()


def test_single_skips_far_apart_do_not_stop():
    model = Linear()
    mp = wrapped(model, options=mpdiag.TrainerOptions(max_skips=2))
    for _ in range(4):
        assert step(mp, model, torch.full((4,), NAN)).skipped
        assert not step(mp, model, torch.ones(4)).skipped
    assert (mp.steps, mp.skipped) == (8, 4)


def test_the_result_names_what_went_non_finite_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mp = wrapped(model, constant(2.0**20))
    with mp.autocast():
        loss = model(torch.ones(2, 4)).float().square().sum() * 1e3
    result = mp.step(loss)
    assert result.skipped
    assert result.cause == "scale"
    assert result.first.where == "backward"
    assert result.first.name.startswith("2.")  # the last layer is the first that backward reaches
    assert "loss scale" in result.reason
    names = [n.name for n in result.non_finite]
    assert names == sorted(names, key=lambda n: -int(n[0]))


def test_replay_tells_the_scale_from_the_format_and_the_model():
    def attempt(x, factor, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.abs() + 0.5)
        mp = wrapped(model, constant(scale))

        def loss_of():
            with mp.autocast():
                return model(x).float().sum() * factor

        before = [p.detach().clone() for p in model.parameters()]
        result = mp.step(loss_of(), replay=loss_of)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return result

    assert attempt(torch.ones(1, 4), 100.0, 2.0**16).cause == "scale"
    beyond = attempt(torch.full((1, 4), 60000.0), 1.0, 1.0)
    assert (beyond.cause, beyond.first.where, beyond.first.name) == ("format", "forward", "0")
    assert attempt(torch.full((1, 4), NAN), 1.0, 1.0).cause == "model"


def test_two_live_trainers_on_one_model_are_refused_and_a_dropped_one_is_forgotten():
    model = Linear()
    mp = wrapped(model)
    with pytest.raises(UsageError, match="another MixedPrecision"):
        wrapped(model)
    mp.close()
    mp = wrapped(model)
    del mp
    wrapped(model).close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_regularisers_act_on_the_fp32_master(level):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    mp = wrapped(model, constant(1024.0), optimizer=sgd, level=level)
    mp.add_regularizer(
        lambda parameters: 0.5e-4 * sum(p.square().sum() for p in parameters.values())
    )
    with mp.autocast():
        loss = model(torch.zeros(2, 4)).sum()
    result = mp.step(loss)
    assert result.gradient_norm == pytest.approx(4e-8, rel=1e-3)
    assert (mp.fp32_state_dict()["weight"] < 1e-4).all()


def test_the_plan_sets_every_setting_of_the_scaler():
    plan = PrecisionPlan(
        loss_scale=LossScalePlan(
            method="backoff", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25,
            growth_interval=5, hysteresis=2, min_scale=2.0, max_scale=4096.0,
        )
    )  # fmt: skip
    mp = wrapped(Linear(), plan)
    assert mp.loss_scaler == Backoff(64.0, 4.0, 0.25, 5, 2, 2.0, 4096.0)
