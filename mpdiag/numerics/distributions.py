"""Student's t distribution and exact bounds of rates, by the incomplete beta function.

Sources: the continued fraction of *Numerical Recipes* (section 6.4), by Lentz's method; Clopper and
Pearson, *The use of confidence or fiducial limits illustrated in the case of the binomial* (Biometrika
26, 1934). SciPy computes the same, but it is not a dependency of the core, which must run on machines
without a package index.
"""

import math
from functools import lru_cache

CONFIDENCE = 0.95
"""Of the bounds of rates."""
_TINY = 1e-300


def t_cdf(t: float, freedom: float) -> float:
    """The chance that Student's t with so many degrees of freedom is at most ``t``."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    whole = freedom + t * t
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / whole, t * t / whole)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """The ``t`` with ``t_cdf(t) = probability``, by bisection."""
    low, high = -1.0, 1.0
    while t_cdf(low, freedom) > probability:
        low *= 2
    while t_cdf(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def rate_interval(events: int, trials: int) -> tuple[float, float]:
    """The Clopper-Pearson interval of a rate, which holds it at least as often as it says."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if events == 0 else _beta_quantile(tail, events, trials - events + 1)
    high = 1.0 if events == trials else _beta_quantile(1 - tail, events + 1, trials - events)
    return low, high


def largest_share(count: int, of: int) -> float:
    """The largest share at which ``count`` or fewer in ``of`` steps are not yet surprising.

    It holds for steps like the counted ones; of steps unlike them, as those of a later phase, nothing
    is known.

    Args:
        count: In how many steps something was seen.
        of: In how many it was looked for.

    Returns:
        A share, one-sided: a larger one would show in more steps with a chance of 95 %; 1 where
        nothing was looked at.
    """
    if count >= of:
        return 1.0
    if count == 0:
        return -math.expm1(math.log1p(-CONFIDENCE) / of)  # with all its digits
    return _beta_quantile(CONFIDENCE, count + 1, of - count)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        below = incomplete_beta(a, b, middle, 1 - middle) < probability
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function I_x(a, b); y is 1 − x, without its cancellation."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    )
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, y) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
