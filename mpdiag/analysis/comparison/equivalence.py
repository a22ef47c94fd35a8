"""Equivalence of two sets of values within a margin, by two one-sided t-tests (TOST).

"No significant difference" proves nothing with three seeds. So the test asks the reverse: is the
difference certainly smaller than a margin, in the metric's own units? There are three answers:
equivalent, different, and inconclusive with the number of seeds that would decide.

Several metrics share one level (``judge_family``): by Holm's procedure the clearest of k claims is
tested at alpha / k, the next at alpha / (k − 1), and so on. That all are equivalent is one claim, which
is wrong only if each test errs that should fail; there the level of each is alpha.

Sources: Holm, *A simple sequentially rejective multiple test procedure* (Scandinavian Journal of
Statistics 6, 1979); Schuirmann, *A comparison of the two one-sided tests procedure and the power
approach* (Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
"""

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpdiag.errors import UsageError
from mpdiag.numerics.distributions import t_cdf, t_quantile

EquivalenceVerdict = Literal["equivalent", "different", "inconclusive"]
POWER = 0.8
_MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Equivalence:
    """The result of the test, and the figures behind it.

    Attributes:
        verdict: ``equivalent``: the interval lies within ±margin; ``different``: it lies entirely
            beyond the margin on one side; else ``inconclusive``.
        difference: Mean of b minus mean of a, in the metric's units.
        low, high: The two-sided confidence interval of the difference at 1 − 2·alpha; infinite
            if there are too few seeds.
        margin: The largest difference that does not matter.
        alpha: Upper bound of the chance of a wrong verdict.
        paired: Whether seeds were compared one by one.
        seeds: Number of seeds of a and of b.
        seeds_to_decide: Seeds on each side that would decide with a chance of 80 %, if mean and
            spread stayed as they are; None if no number would, or the spread is unknown.
        p_equivalent: The smallest alpha at which the verdict would be ``equivalent``; 1 if it
            would be at none below 0.5.
        p_different: The same for ``different``.
    """

    verdict: EquivalenceVerdict
    difference: float
    low: float
    high: float
    margin: float
    alpha: float
    paired: bool
    seeds: tuple[int, int]
    seeds_to_decide: int | None
    p_equivalent: float = 1.0
    p_different: float = 1.0

    @property
    def p_value(self) -> float:
        """That of the clearer one of both claims."""
        return min(self.p_equivalent, self.p_different)


def judge_equivalence(
    a: Sequence[float],
    b: Sequence[float],
    margin: float,
    *,
    alpha: float = 0.05,
    paired: bool = False,
) -> Equivalence:
    """Test whether b is equivalent to a.

    Args:
        a: One value per seed. One that is not finite is of a training that diverged: then nothing
            is said of the mean, see ``rates`` for how often a side diverges.
        b: The same for b; paired values in the same order.
        margin: The largest difference that does not matter, above 0, in the values' units.
        alpha: Significance of each one-sided test.
        paired: Compare seed by seed, which removes the spread that seeds share.

    Raises:
        UsageError: If the margin or alpha makes no sense.
    """
    if not (math.isfinite(margin) and margin > 0):
        message = f"the margin must be a number above 0, in the metric's own units, not {margin!r}"
        raise UsageError(message)
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha must lie between 0 and 0.5, not {alpha!r}")
    if not all(map(math.isfinite, [*a, *b])):
        low, high, seeds = -math.inf, math.inf, (len(a), len(b))
        return Equivalence("inconclusive", math.nan, low, high, margin, alpha, paired, seeds, None)
    difference = statistics.fmean(b) - statistics.fmean(a)
    error, freedom = _standard_error(a, b, paired=paired)
    reach = math.inf if freedom < 1 else error * t_quantile(1 - alpha, freedom)
    low, high = difference - reach, difference + reach
    verdict: EquivalenceVerdict = "inconclusive"
    if -margin < low and high < margin:
        verdict = "equivalent"
    elif low > margin or high < -margin:
        verdict = "different"
    needed = None
    if verdict == "inconclusive" and freedom >= 1:
        spread = error / math.sqrt(1 / len(a) if paired else 1 / len(a) + 1 / len(b))
        needed = seeds_to_decide(difference, spread, margin, alpha=alpha, paired=paired)
    return Equivalence(
        verdict,
        difference,
        low,
        high,
        margin,
        alpha,
        paired,
        (len(a), len(b)),
        needed,
        *_p_values(difference, error, freedom, margin),
    )


def _p_values(
    difference: float, error: float, freedom: float, margin: float
) -> tuple[float, float]:
    """Of "it is beyond the margin" and of "it is within": how seldom the data would look so clear."""
    room = margin - abs(difference)
    if freedom < 1 or room == 0:
        return 1.0, 1.0
    if error == 0:
        return (0.0, 1.0) if room > 0 else (1.0, 0.0)
    p = t_cdf(-abs(room) / error, freedom)
    return (p, 1.0) if room > 0 else (1.0, p)


def judge_family(
    found: Sequence[Equivalence], alpha: float, others: Sequence[float] = ()
) -> list[float]:
    """The level at which each metric is to be judged, so that all share the one ``alpha``.

    Args:
        found: The metrics, judged at any level.
        alpha: The chance of any wrong verdict.
        others: p-values of further tests of the same family; their levels follow the metrics'.
    """
    p_values = [*(e.p_value for e in found), *others]
    if found and not others and all(e.p_equivalent <= alpha for e in found):
        return [alpha] * len(found)
    levels = [0.0] * len(p_values)
    level, holds = alpha / max(1, len(p_values)), True
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if holds:
            level = alpha / (len(p_values) - rank)
            holds = p_values[i] <= level
        levels[i] = level
    return levels


def _standard_error(a: Sequence[float], b: Sequence[float], *, paired: bool) -> tuple[float, float]:
    """Standard error of the difference and its degrees of freedom (Welch); 0 where unknown."""
    if paired:
        if len(a) < 2:
            return math.inf, 0.0
        steps = [y - x for x, y in zip(a, b, strict=True)]
        return statistics.stdev(steps) / math.sqrt(len(steps)), len(steps) - 1
    if min(len(a), len(b)) < 2:
        return math.inf, 0.0
    parts = [statistics.variance(side) / len(side) for side in (a, b)]
    total = sum(parts)
    if total == 0:
        return 0.0, len(a) + len(b) - 2
    # Shares of the total, since squares of tiny variances vanish.
    sides = zip(parts, (a, b), strict=True)
    freedom = 1 / sum((p / total) ** 2 / (len(s) - 1) for p, s in sides)
    return math.sqrt(total), freedom


def seeds_to_decide(
    difference: float, spread: float, margin: float, *, alpha: float = 0.05, paired: bool = False
) -> int | None:
    """Seeds on each side that decide with a chance of 80 %.

    Args:
        difference: The true difference of means, assumed to be the one observed.
        spread: Standard deviation of one value (paired: of one difference).
        margin: As in ``judge_equivalence``.
        alpha: As in ``judge_equivalence``.
        paired: As in ``judge_equivalence``.

    Returns:
        A number of at least 2; None if more than 10,000 would be needed.
    """
    room = abs(margin - abs(difference))
    if room == 0:
        return None
    inside = abs(difference) < margin
    # Both one-sided tests must succeed: where the difference is 0, each may fail half as often.
    miss = (1 - POWER) / 2 if inside and difference == 0 else 1 - POWER

    def decides(n: int) -> bool:
        freedom = n - 1 if paired else 2 * (n - 1)
        error = spread * math.sqrt((1 if paired else 2) / n)
        return room >= error * (t_quantile(1 - alpha, freedom) + t_quantile(1 - miss, freedom))

    numbers = range(2, _MOST_SEEDS + 1)
    found = bisect.bisect_left(numbers, True, key=decides)
    return numbers[found] if found < len(numbers) else None
