"""The parts of a comparison: a metric, the loss curves, a layer that moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.analysis.comparison.equivalence import Equivalence
    from mpdiag.analysis.comparison.margins import Margin


@dataclass(frozen=True)
class MetricComparison:
    """One metric on both sides.

    Attributes:
        metric: Its name.
        higher_is_better: Whether more is better.
        a, b: One value per seed; NaN where a training that diverged has none.
        result: The equivalence test, of the trainings that did not diverge.
        margin: How much does not matter, and why.
    """

    metric: str
    higher_is_better: bool
    a: tuple[float, ...]
    b: tuple[float, ...]
    result: Equivalence
    margin: Margin

    @property
    def margin_given(self) -> bool:
        """Whether the margin was given, rather than chosen by the kind of metric."""
        return self.margin.given

    @property
    def worse(self) -> bool:
        """Whether b's mean is the worse one."""
        return (self.result.difference < 0) == self.higher_is_better


@dataclass(frozen=True)
class Curve:
    """The difference between two loss curves.

    Attributes:
        steps: Steps that both sides have.
        worst_step: The step with the largest gap between the means; None without common steps.
        departure: That gap, in the loss's units (b minus a).
        spread: Standard deviation over seeds at that step on the first side; None for one seed.
    """

    steps: int
    worst_step: int | None
    departure: float
    spread: float | None


@dataclass(frozen=True)
class LayerShift:
    """A layer whose largest value moved.

    Attributes:
        kind, name: The layer.
        octaves: log2 of b's largest |x| over a's, averaged over seeds.
    """

    kind: str
    name: str
    octaves: float
