"""Loss scalers against torch's own, against simulation, and against nonsense."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale, LogNormal, overflows, scaler_named
from mpdiag.plan import LossScalePlan


@given(pattern=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5))
def test_backoff_is_torchs_grad_scaler(pattern, interval):
    ours = Backoff(1024.0, growth_interval=interval, min_scale=2.0**-100, max_scale=2.0**100)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for overflow in pattern:
        assert ours.scale == theirs.get_scale()
        theirs.scale(weight.sum())  # as a loop would: the scale comes to life here
        weight.grad = torch.full_like(weight, math.inf if overflow else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours = ours.adjust(math.inf if overflow else 0.0)
    assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize(
    ("settings", "overflows", "scales"),
    [
        ({"growth_interval": 2}, "xxxx", [256, 256, 128, 64]),
        ({"growth_interval": 2}, "xx.x", [256, 256, 256, 128]),
        ({"growth_interval": 2}, "xxx..xx", [256, 256, 128, 128, 256, 256, 256]),
        ({"consecutive_hysteresis": True}, "xx.xx.", [256] * 6),
        ({"consecutive_hysteresis": True}, "xx.xxx", [*[256] * 5, 128]),
    ],
)
def test_used_up_hysteresis_is_refilled_by_growth_or_by_every_finite_step(
    settings, overflows, scales
):
    """The first as DeepSpeed, Apex and Megatron count; the second as ``consecutive_hysteresis``."""
    made = LossScalePlan().with_scaler(Backoff(256.0, hysteresis=3, **settings))
    assert made.settings == {n: v for n, v in settings.items() if n != "growth_interval"}
    s, seen = made.scaler(), []
    for overflow in overflows:
        s = s.adjust(math.inf if overflow == "x" else 0.0)
        seen.append(s.scale)
    assert seen == scales


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30, math.inf, math.nan]), max_size=50))
def test_lognormal_always_has_a_sound_scale(maxima):
    s = LogNormal()
    for absmax in maxima:
        s = s.adjust(absmax)
        assert 1.0 <= s.scale <= 2.0**24
        assert math.log2(s.scale).is_integer()


@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_lognormal_takes_equal_maxima_for_the_largest_from_the_first_step_on(steps):
    s = LogNormal()
    for _ in range(steps):
        s = s.adjust(3.0)
    assert not overflows(3.0, s.scale)
    assert overflows(3.0, 2 * s.scale)


def test_lognormal_overflows_about_as_rarely_as_promised_and_recovers():
    logs = np.random.default_rng(0).normal(-3.0, 1.5, 20_000)
    s, skipped = LogNormal(), 0
    for i, x in enumerate(logs):
        absmax = 2.0 ** float(x)
        skipped += i > 1000 and overflows(absmax, s.scale)
        s = s.adjust(absmax)
    assert skipped / len(logs) < 0.002
    assert s.scale >= 2.0**12
    steady = s.scale
    for _ in range(3):
        s = s.adjust(math.inf)
    for x in logs[:500]:
        s = s.adjust(2.0 ** float(x))
    assert s.scale >= steady / 4


NONSENSE = {
    "constant": [("init_scale", 0), ("init_scale", math.nan)],
    "backoff": [
        *[("init_scale", -1.0), ("init_scale", math.nan), ("growth_interval", 2.5), ("bogus", 1)],
        *[("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)],
        *[("hysteresis", 0), ("hysteresis", True), ("consecutive_hysteresis", 1)],
    ],
    "lognormal": [("beta1", 1.0), ("quantile", math.inf)],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_by_name(name):
    for setting, value in NONSENSE[name]:
        with pytest.raises(UsageError, match=setting):
            scaler_named(name, **{setting: value})


@given(
    pattern=st.lists(st.booleans(), max_size=80),
    tolerance=st.floats(0.0, 0.9),
    interval=st.integers(1, 6),
)
def test_a_tolerated_share_of_overflows_does_not_back_off(pattern, tolerance, interval):
    """fairseq's rule, written out: back off once overflows since the last change exceed a share."""
    ours = Backoff(1024.0, tolerance=tolerance, growth_interval=interval)
    scale, history, quiet = 1024.0, [], 0
    for overflow in pattern:
        ours = ours.adjust(math.inf if overflow else 0.0)
        history.append(overflow)
        quiet = 0 if overflow else quiet + 1
        share = sum(history) / len(history)
        if overflow and share > tolerance:
            scale, history, quiet = max(1.0, scale / 2), [], 0
        elif quiet == interval:
            scale, history, quiet = min(2.0**24, scale * 2), [], 0
        assert ours.scale == scale


@pytest.mark.parametrize(
    ("scaler", "floor"),
    [(ConstantScale(8.0), None), (Backoff(min_scale=2.0), 2.0), (LogNormal(min_scale=4.0), 4.0)],
)
def test_the_smallest_scale_it_can_fall_to(scaler, floor):
    assert scaler.floor == floor
