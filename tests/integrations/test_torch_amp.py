"""``torch.amp`` by a plan: the scaler walks exactly as the plan's own algebra says."""

import math

import pytest
import torch
from support import backoff, constant

from mpdiag.errors import StateMismatch
from mpdiag.integrations.torch_amp import autocast_arguments, grad_scaler
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.training.levels import resolve, scaler_of

LOGNORMAL = PrecisionPlan(
    loss_scale=LossScalePlan(method="lognormal", init_scale=256.0, max_scale=4096.0)
)
SHORT = backoff(64.0, growth_interval=3, hysteresis=2, min_scale=16.0, max_scale=256.0)


def walk(plan, factors):
    """Train on one weight whose gradient is each factor; the scale in force at each step."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 1e-30)
    scaler = grad_scaler(plan, "cpu")
    scales = []
    for factor in factors:
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scales


@pytest.mark.parametrize(
    "plan", [constant(512.0), SHORT, LOGNORMAL], ids=["constant", "backoff", "log"]
)
def test_scales_are_those_of_the_plans_scaler(plan):
    inf = math.inf
    factors = [1.0, 0.5, 2.0, 3.0, inf, 1.0, math.nan, inf, inf, 0.25, 1.0, 1.0, 1.0, 8.0]
    expected, state = [], scaler_of(plan.loss_scale, resolve(plan))
    for factor in factors:
        expected.append(state.scale)
        state = state.adjust(factor)
    assert walk(plan, factors) == expected
    assert plan.loss_scale.method == "constant" or len(set(expected)) > 2


def test_no_scale_and_fp32():
    assert not grad_scaler(PrecisionPlan(), "cpu").is_enabled()
    assert not autocast_arguments(PrecisionPlan(level="O0"), "cpu")["enabled"]
    assert autocast_arguments(backoff())["dtype"] == torch.float16
    assert autocast_arguments(PrecisionPlan(target="bf16"))["dtype"] == torch.bfloat16
    with torch.autocast(**autocast_arguments(PrecisionPlan(level="O0"), "cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_the_state_goes_round():
    a, b = grad_scaler(SHORT, "cpu"), grad_scaler(SHORT, "cpu")
    a.scale(torch.ones(1))
    a._plan_scaler = a._plan_scaler.adjust(math.inf).adjust(math.inf)
    a._scale.fill_(a._plan_scaler.scale)
    b.load_state_dict(a.state_dict())
    assert b._plan_scaler == a._plan_scaler
    assert b.get_scale() == a.get_scale() == 32.0
    with pytest.raises(StateMismatch, match="Backoff, but the plan uses LogNormal"):
        grad_scaler(LOGNORMAL, "cpu").load_state_dict(a.state_dict())
