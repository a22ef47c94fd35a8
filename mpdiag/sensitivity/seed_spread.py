"""Whether a training is as good as FP32, given the spread of FP32 over seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.errors import UsageError
from mpdiag.numerics.students_t import t_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

ALPHA = 0.01
LEAST = 0.01


@dataclass(frozen=True)
class SeedSpread:
    """The metrics of FP32 trainings that differ by seed only.

    Attributes:
        metrics: One per seed.
        higher_is_better: Whether more is better.
        bound: The worst metric that still counts as FP32's: one more FP32 seed would be worse with
            a chance of 1 % (a one-sided prediction interval of Student's t), but at least 1 %
            of the mean's size away.
    """

    metrics: tuple[float, ...]
    higher_is_better: bool
    bound: float

    def holds(self, metric: float) -> bool:
        """Whether a metric is as good as FP32's."""
        if not math.isfinite(metric):
            return False
        return metric >= self.bound if self.higher_is_better else metric <= self.bound

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {
            "metrics": list(self.metrics),
            "higher_is_better": self.higher_is_better,
            "bound": self.bound,
        }


def spread_of(metrics: Sequence[float], *, higher_is_better: bool) -> SeedSpread:
    """The spread of the metrics of several FP32 seeds.

    Raises:
        UsageError: If there are fewer than two, or one is not finite.
    """
    if len(metrics) < 2:
        message = "the spread of FP32 seeds needs at least two seeds"
        raise UsageError(message)
    if not all(map(math.isfinite, metrics)):
        message = "an FP32 training diverged: fix that before changing the format"
        raise UsageError(message)
    mean, n = statistics.fmean(metrics), len(metrics)
    reach = t_quantile(1 - ALPHA, n - 1) * statistics.stdev(metrics) * math.sqrt(1 + 1 / n)
    reach = max(reach, LEAST * abs(mean))
    bound = mean - reach if higher_is_better else mean + reach
    return SeedSpread(tuple(map(float, metrics)), higher_is_better, bound)
