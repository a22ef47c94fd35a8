"""How a loss-scaling trainer must behave: one test for each behaviour, named after what it protects.

The behaviours are those that the public suites of PyTorch, Apex, jmp, Keras, DeepSpeed, OpenSeq2Seq,
Lightning and accelerate describe, and those that users of these found missing.
"""

from __future__ import annotations

import pytest
import torch
from support import backoff, constant
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch, UsageError
from mpdiag.numerics.loss_scalers import Backoff, LogNormal
from mpdiag.plan import LossScalePlan, PrecisionPlan

INF, NAN = float("inf"), float("nan")


class Linear(nn.Module):
    """y = w · x, so that the gradient of w is the input, times what the loss is multiplied by."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def trainer(model, plan=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return mpdiag.MixedPrecision(model, optimizer, plan or backoff(), **options)


def step(mp, model, x, **options):
    with mp.autocast():
        loss = model(x)
    return mp.step(loss, **options)


def test_lognormal_sees_gradients_before_they_are_clipped():
    model, other = Linear(), Linear()
    mp, unclipped = (
        trainer(m, overrides=mpdiag.PrecisionOverrides(loss_scale=LogNormal(init_scale=8.0)))
        for m in (model, other)
    )
    for _ in range(3):
        clipped = step(mp, model, torch.full((4,), 100.0), clip_norm=1e-3)
        free = step(unclipped, other, torch.full((4,), 100.0))
    assert clipped.next_scale == free.next_scale


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(UsageError, match="groth_interval"):
        trainer(
            Linear(),
            overrides=mpdiag.PrecisionOverrides(
                loss_scale={"method": "backoff", "groth_interval": 3}
            ),
        )


def test_gradients_unscaled_early_may_still_be_added_to():
    model = Linear()
    mp = trainer(model, constant(8.0))
    mp.backward(model(torch.ones(4)))
    mp.unscale()
    mp.backward(model(torch.ones(4)))
    mp.unscale()
    assert torch.equal(model.w.grad, torch.full((4,), 2.0))


def test_a_buffer_that_goes_infinite_alone_skips_the_step():
    """A branch whose result is thrown away still updates its statistics."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.norm = nn.BatchNorm1d(4, affine=False)

        def forward(self, x):
            self.norm(x)
            return (self.w * x.clamp(-1, 1)).sum()

    model = Model()
    mp = trainer(model)
    result = step(mp, model, torch.full((3, 4), INF))
    assert result.skipped
    assert result.first.where == "buffers"
    assert "running_mean" in result.first.name
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_gradients_whose_squares_leave_fp32_are_skipped():
    """Adam's second moment of a gradient of 1e25 is infinite, and its updates zero for ever."""
    model = Linear()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    mp = trainer(model, optimizer=adam, level="O0")
    assert step(mp, model, torch.full((4,), 1e25)).skipped
    step(mp, model, torch.ones(4))
    assert torch.isfinite(adam.state[model.w]["exp_avg_sq"]).all()


def test_a_callers_zero_grad_does_no_harm():
    model, other = Linear(), Linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mp, plain = trainer(model, optimizer=optimizer), trainer(other)
    for _ in range(3):
        optimizer.zero_grad()
        step(mp, model, torch.ones(4))
        step(plain, other, torch.ones(4))
    assert torch.equal(model.w, other.w)


def test_gradients_are_cleared_by_a_step_and_by_a_skip():
    model = Linear()
    mp = trainer(model)
    step(mp, model, torch.ones(4))
    assert model.w.grad is None
    step(mp, model, torch.full((4,), NAN))
    assert model.w.grad is None


def test_single_skips_far_apart_do_not_stop():
    model = Linear()
    mp = trainer(model, options=mpdiag.TrainerOptions(max_skips=2))
    for _ in range(4):
        assert step(mp, model, torch.full((4,), NAN)).skipped
        assert not step(mp, model, torch.ones(4)).skipped
    assert (mp.steps, mp.skipped) == (8, 4)


def test_the_result_names_what_went_non_finite_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mp = trainer(model, constant(2.0**20))
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
        mp = trainer(model, constant(scale))

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


def test_the_state_round_trips_every_field():
    model = Linear()
    mp = trainer(
        model, backoff(64.0, growth_interval=7, hysteresis=3, min_scale=2.0, max_scale=512.0)
    )
    for value in (1.0, 1.0, NAN, 1.0):
        step(mp, model, torch.full((4,), value))
    state = mp.state_dict()
    mp.close()
    other = Linear()
    again = trainer(other, mp.plan)
    again.load_state_dict(state)
    assert again.loss_scaler == mp.loss_scaler
    assert (again.steps, again.skipped) == (4, 1)
    assert torch.equal(other.w, model.w)


def test_a_state_of_another_level_or_model_is_refused():
    model = Linear()
    mp = trainer(model, backoff(64.0))
    state = mp.state_dict()
    mp.close()
    with pytest.raises(StateMismatch, match="level"):
        trainer(model, backoff(64.0), level="O2").load_state_dict(state)
    with pytest.raises(StateMismatch):
        trainer(nn.Linear(3, 3), backoff(64.0)).load_state_dict(state)
    with pytest.raises(StateMismatch):
        trainer(Linear()).load_state_dict({"scale": 3})


def test_two_live_trainers_on_one_model_are_refused_and_a_dropped_one_is_forgotten():
    model = Linear()
    mp = trainer(model)
    with pytest.raises(UsageError, match="another MixedPrecision"):
        trainer(model)
    mp.close()
    mp = trainer(model)
    del mp
    trainer(model).close()


def test_weight_decay_of_small_weights_survives_through_the_master():
    """1e-4 · 1e-4 is zero in FP16."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-4)
    mp = trainer(model, constant(1.0), optimizer=sgd, level="O2")
    with mp.autocast():
        loss = model(torch.zeros(2, 4)).sum()
    mp.step(loss)
    expected = torch.tensor(1e-4) - torch.tensor(1e-4) * torch.tensor(1e-4)
    assert torch.equal(mp.fp32_state_dict()["weight"], expected.expand(4, 4))
    assert expected != torch.tensor(1e-4)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_regularisers_act_on_the_fp32_master(level):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    mp = trainer(model, constant(1024.0), optimizer=sgd, level=level)
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
    mp = trainer(Linear(), plan)
    assert mp.loss_scaler == Backoff(64.0, 4.0, 0.25, 5, 2, 2.0, 4096.0)
