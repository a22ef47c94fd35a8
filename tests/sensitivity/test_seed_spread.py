"""What counts as good as FP32."""

from __future__ import annotations

import math
import statistics

import pytest

from mpdiag.errors import UsageError
from mpdiag.sensitivity.search_state import spread_of


def test_the_bound_is_a_prediction_interval():
    metrics = [0.90, 0.92, 0.91, 0.93, 0.89]
    up = spread_of(metrics, higher_is_better=True)
    # Student's t at 99 % with 4 degrees of freedom is 3.746947 (printed tables).
    reach = 3.746947 * statistics.stdev(metrics) * math.sqrt(1 + 1 / 5)
    assert up.bound == pytest.approx(0.91 - reach, rel=1e-5)
    assert spread_of(metrics, higher_is_better=False).bound == pytest.approx(0.91 + reach, rel=1e-5)


def test_only_worse_counts_and_what_is_not_finite_never_holds():
    up = spread_of([1.0, 1.1], higher_is_better=True)
    assert up.holds(1e9)
    assert not up.holds(-1e9)
    assert not any(map(up.holds, (math.nan, math.inf, -math.inf)))
    down = spread_of([1.0, 1.1], higher_is_better=False)
    assert down.holds(-1e9)
    assert not down.holds(1e9)


def test_seeds_that_agree_leave_one_per_cent():
    assert spread_of([2.0, 2.0, 2.0], higher_is_better=True).bound == pytest.approx(1.98)
    assert spread_of([-2.0, -2.0], higher_is_better=False).bound == pytest.approx(-1.98)


@pytest.mark.parametrize("metrics", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_what_has_no_spread_is_refused(metrics):
    with pytest.raises(UsageError):
        spread_of(metrics, higher_is_better=True)
