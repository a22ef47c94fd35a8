"""Student's t and bounds of rates, against mpmath and SciPy."""

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdiag.numerics.distributions import largest_share, rate_interval, t_cdf, t_quantile

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is the oracle; pip install scipy")


@given(st.floats(-50, 50), st.floats(1, 500))
def test_students_distribution_is_the_incomplete_beta_functions(t, freedom):
    """mpmath is the oracle, which torch brings: SciPy's is off by 6e-11 near 0 at 1 freedom."""
    with mpmath.workdps(30):
        half, x = mpmath.mpf(freedom) / 2, mpmath.mpf(freedom) / (freedom + mpmath.mpf(t) ** 2)
        tail = mpmath.betainc(half, mpmath.mpf(1) / 2, 0, x, regularized=True) / 2
    assert t_cdf(t, freedom) == pytest.approx(float(1 - tail if t > 0 else tail), abs=1e-12)


def test_a_t_with_a_square_beyond_all_floats_is_certain():
    assert (t_cdf(1e200, 4), t_cdf(-1e200, 4)) == (1.0, 0.0)


@given(st.floats(0.001, 0.999), st.floats(1, 500))
def test_students_quantile_is_scipys(probability, freedom):
    expected = scipy_stats.t.ppf(probability, freedom)
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("n", [1, 3, 10, 69, 5000])
def test_bounds_of_a_rate_are_clopper_and_pearsons(n):
    for k in {*range(min(n, 10) + 1), n // 2, n}:
        seen = scipy_stats.binomtest(k, n), scipy_stats.binomtest(k, n, alternative="less")
        assert rate_interval(k, n) == pytest.approx(tuple(seen[0].proportion_ci()), abs=1e-9)
        assert largest_share(k, n) == pytest.approx(seen[1].proportion_ci().high, abs=1e-9)
    assert largest_share(0, 0) == 1.0
