"""How often trainings diverge on two sides, compared by an exact test.

A training that diverged has no metric to average, but that some seeds diverge does not make two sides
different: with one in ten on both, equal sides seldom show equal counts. So counts are compared as
rates, by Boschloo's test: Fisher's p-value is the statistic, and its own p-value is the largest chance,
over all rates that both sides may share, to see one as small. It is exact for any number of seeds and
more powerful than Fisher's: 0 of 3 against 3 of 3 gives 0.031 where Fisher's gives 0.1.

Source: Boschloo, *Raised conditional level of significance for the 2 × 2 table when testing the
equality of two probabilities* (Statistica Neerlandica 24, 1970).
"""

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpdiag.numerics.distributions import CONFIDENCE, rate_interval

POWER = 0.8
MOST_BOSCHLOO = 100
"""Seeds of a side up to which Boschloo's test is run; beyond it is Fisher's, and nearly the same."""
MOST_SEEDS = 300
_GRID = 1_001
_SMALL = 40
"""Seeds up to which the power is Boschloo's; beyond it is Fisher's, which is a little smaller."""
_TIE = 1 + 1e-9


@dataclass(frozen=True)
class RateComparison:
    """How often trainings diverged on two sides.

    Attributes:
        diverged: Trainings of a and of b that diverged.
        seeds: All trainings of a and of b.
        p_value: Two-sided, of the hypothesis that both have the same rate.
        alpha: The level it is judged at.
        seeds_to_decide: Seeds on each side that would show the observed rates to be different with
            a chance of 80 %; None if the rates are equal or no number up to 300 would.
    """

    diverged: tuple[int, int]
    seeds: tuple[int, int]
    p_value: float
    alpha: float
    seeds_to_decide: int | None

    @property
    def verdict(self) -> Literal["different", "inconclusive"]:
        """Whether the rates are shown to be different. That they are equal is never shown."""
        return "different" if self.p_value <= self.alpha else "inconclusive"

    @property
    def any(self) -> bool:
        """Whether any training diverged."""
        return any(self.diverged)

    @property
    def more_in_b(self) -> bool:
        """Whether the observed rate of b is the higher one."""
        return self.diverged[1] * self.seeds[0] > self.diverged[0] * self.seeds[1]

    @property
    def intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Clopper-Pearson intervals of both rates at 95 %."""
        (a, b), (n, m) = self.diverged, self.seeds
        return rate_interval(a, n), rate_interval(b, m)

    def to_json(self) -> dict[str, Any]:
        """The ``divergence`` of ``mpdiag compare --json``."""
        sides = {
            side: {"diverged": k, "seeds": n, "rate": k / n, "low": low, "high": high}
            for side, k, n, (low, high) in zip(
                "ab", self.diverged, self.seeds, self.intervals, strict=True
            )
        }
        return {
            **sides,
            "confidence": CONFIDENCE,
            "p_value": self.p_value,
            "alpha": self.alpha,
            "verdict": self.verdict,
            "seeds_to_decide": self.seeds_to_decide,
        }


def compare_rates(
    diverged: tuple[int, int], seeds: tuple[int, int], alpha: float = 0.05
) -> RateComparison:
    """Compare how often trainings diverged on two sides, each of at least one training."""
    (a, b), (n, m) = diverged, seeds
    p = rates_p_value(a, n, b, m)
    needed = None if p <= alpha else seeds_to_show(a / n, b / m, alpha)
    return RateComparison(diverged, seeds, p, alpha, needed)


@lru_cache(maxsize=4096)
def rates_p_value(a: int, n: int, b: int, m: int) -> float:
    """Boschloo's two-sided p-value of a events in n trials against b in m: twice the smaller tail."""
    return min(1.0, 2 * min(_one_sided(a, n, b, m), _one_sided(b, m, a, n)))


def _one_sided(a: int, n: int, b: int, m: int) -> float:
    """The p-value of "b's rate is not the higher one"."""
    table = _fisher(n, m)
    if max(n, m) > MOST_BOSCHLOO:
        return float(table[a, b])
    return _largest_size(table <= table[a, b] * _TIE)


@lru_cache(maxsize=64)
def _fisher(n: int, m: int) -> NDArray[np.float64]:
    """Fisher's one-sided p-value of each outcome: (n + 1, m + 1), events in n and in m trials.

    Entry [a, b] is the chance of b or more events in m, given a + b events in all.
    """
    table = np.ones((n + 1, m + 1))
    of_n, of_m = ([math.comb(k, i) for i in range(k + 1)] for k in (n, m))
    for total in range(n + m + 1):
        whole, above = math.comb(n + m, total), 0
        for b in range(min(m, total), max(0, total - n) - 1, -1):
            above += of_m[b] * of_n[total - b]
            table[total - b, b] = above / whole
    return table


def _largest_size(region: NDArray[np.bool_]) -> float:
    """The largest chance, over all rates that both sides share, of an outcome in a region."""
    n, m = (size - 1 for size in region.shape)

    def size(rates: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = _binomial(n, rates) @ region.astype(float)
        chances: NDArray[np.float64] = (inside * _binomial(m, rates)).sum(axis=1)
        return chances

    low, high = 0.0, 1.0
    for _ in range(3):  # the grid, and twice a finer one around its largest value
        rates = np.linspace(low, high, _GRID if high - low == 1 else 41)
        chances = size(rates)
        at = int(chances.argmax())
        low, high = float(rates[max(0, at - 1)]), float(rates[min(len(rates) - 1, at + 1)])
    return min(1.0, float(chances[at]))


def _binomial(trials: int, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chances of 0 … trials events: (rates, trials + 1)."""
    events = np.arange(trials + 1)
    ways = np.array([float(math.comb(trials, k)) for k in range(trials + 1)])
    p = rates[:, None]
    chances: NDArray[np.float64] = ways * p**events * (1 - p) ** (trials - events)
    return chances


@lru_cache(maxsize=256)
def seeds_to_show(rate_a: float, rate_b: float, alpha: float = 0.05) -> int | None:
    """Seeds on each side that show two rates to be different with a chance of 80 %.

    Returns:
        A number of at least 2; None if the rates are equal or more than 300 would be needed.
    """
    low, high = sorted((rate_a, rate_b))
    if low == high:
        return None
    most = 2
    while most < MOST_SEEDS and _power(most, low, high, alpha) < POWER:
        most *= 2  # small numbers first: large ones take long
    numbers = range(most // 2 + 1, min(most, MOST_SEEDS) + 1)
    found = bisect.bisect_left(numbers, True, key=lambda n: _power(n, low, high, alpha) >= POWER)
    return numbers[found] if found < len(numbers) else None


def _power(seeds: int, low: float, high: float, alpha: float) -> float:
    """The chance that so many seeds on each side show the second rate to be the higher one."""
    table = _fisher(seeds, seeds)
    critical = alpha / 2
    if seeds <= _SMALL:
        # The largest statistic whose region still keeps the level; Fisher's own always does.
        known = np.unique(table)
        known = known[np.searchsorted(known, critical, side="right") :]
        fits = bisect.bisect_left(
            known, True, key=lambda p: _largest_size(table <= p * _TIE) > alpha / 2
        )
        critical = float(known[fits - 1]) if fits else critical
    a, b = (_binomial(seeds, np.array([rate]))[0] for rate in (low, high))
    return float(a @ (table <= critical * _TIE) @ b)
