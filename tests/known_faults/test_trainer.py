"""Faults of the trainer that are known and not yet mended.

A test that passes here fails (``xfail_strict``): the fault is mended, and the test moves.
"""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support import one_thread  # noqa: F401 - a fixture
from torch import nn

import mpdiag
from mpdiag.integrations.accelerate import apply_plan
from mpdiag.plan import LossScalePlan, PrecisionPlan

pytestmark = pytest.mark.filterwarnings("default")


def plan(target="bf16", method="none", scale=1.0):
    return PrecisionPlan(target=target, loss_scale=LossScalePlan(method=method, init_scale=scale))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def step(mp, model, x):
    with mp.autocast():
        loss = model(x).float().sum()
    return mp.step(loss)


@pytest.mark.xfail(reason="micro-batches add up in BF16")
@pytest.mark.parametrize(("target", "error"), [("fp16", 0.001), ("bf16", 0.004)])
def test_micro_batches_add_up_in_fp32_at_o2(target, error):
    n = 512
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, 4, generator=generator) * 0.1 + 0.3
    made = plan(target, "constant", 64.0)
    mp = mpdiag.MixedPrecision(model, sgd(model, 1.0), made, level="O2")
    for row in rows:
        with mp.autocast():
            loss = model(row[None]).float().sum() / n
        mp.backward(loss)
    mp.step()
    mp.close()
    mean = rows.mean(0)
    assert (model.weight.detach()[0] + mean).norm() / mean.norm() < error


@pytest.mark.xfail(reason="requires_grad_ after wrapping does not reach the masters")
@pytest.mark.parametrize(("trained", "factor"), [(False, 1.0), (True, 0.9)])
def test_freezing_after_wrapping_reaches_the_regularizer_at_o2(trained, factor):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    model[0].requires_grad_(not trained)
    mp = mpdiag.MixedPrecision(model, sgd(model), plan(), level="O2")
    mp.add_regularizer(lambda ps: 0.5 * sum(p.square().sum() for p in ps.values()))
    model[0].requires_grad_(trained)
    before = model[0].weight.detach().float().clone()
    with mp.autocast():
        loss = model(torch.ones(1, 4)).float().sum() * 0
    mp.step(loss)
    mp.close()
    torch.testing.assert_close(model[0].weight.detach().float(), factor * before, rtol=0.02, atol=0)


@pytest.mark.xfail(reason="only None is known as a gradient that was thrown away")
@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_bad_micro_batch_is_thrown_away_by_zeros_too(level):
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    mp = mpdiag.MixedPrecision(model, optimizer, plan(), level=level)
    with mp.autocast():
        loss = model(torch.full((1, 4), float("nan"))).float().sum()
    mp.backward(loss)
    optimizer.zero_grad(set_to_none=False)
    assert not step(mp, model, torch.ones(1, 4)).skipped


@pytest.mark.xfail(reason="the scaler does not keep its trainer alive")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scaler_keeps_its_trainer(level):
    model = nn.Linear(4, 1, bias=False)
    scaler = mpdiag.MixedPrecision(model, sgd(model), plan(), level=level).scaler()
    gc.collect()
    assert scaler is not None
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16


class Scaled(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * getattr(p, "lr_scale", 1.0))


@pytest.mark.xfail(reason="masters are bare tensors")
def test_attributes_of_a_parameter_reach_its_master():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model.weight.lr_scale = 8.0
    mp = mpdiag.MixedPrecision(model, Scaled(model.parameters(), 0.1), plan(), level="O2")
    step(mp, model, torch.ones(1, 4))
    mp.close()
    assert float(model.weight.detach().mean()) == pytest.approx(0.2, abs=0.01)


@pytest.mark.xfail(reason="the model receives its weights after the optimizer's hooks")
def test_a_hook_after_the_step_sees_the_weights_of_this_step():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer, seen = sgd(model), []
    mp = mpdiag.MixedPrecision(model, optimizer, plan(), level="O2")
    optimizer.register_step_post_hook(lambda *_: seen.append(float(model.weight.detach().mean())))
    for _ in range(3):
        step(mp, model, torch.ones(1, 4))
    assert seen == pytest.approx([0.9, 0.8, 0.7], abs=0.01)


@pytest.mark.xfail(reason="the unwrapped model keeps a local forward")
def test_an_unwrapped_model_of_accelerate_can_be_pickled():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = apply_plan(Accelerator(cpu=True), plan(), level="O1")
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    pickle.dumps(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
