"""Backoff, the dynamic loss scale of most frameworks.

Sources: NVIDIA, *Training with Mixed Precision User Guide* (dynamic scaling); OpenSeq2Seq,
*Mixed Precision Training*; ``torch.amp.GradScaler`` for the names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers.protocol import (
    LARGEST_SCALE,
    Scaler,
    ScaleRange,
    check_positive,
    check_whole,
    overflows,
    state,
)

INTERVALS = (2000, 1000, 500, 200, 100, 50, 20)
"""Growth intervals proposed, ``torch.amp.GradScaler``'s first: the longer, the fewer skips."""


@dataclass(frozen=True)
class Backoff(Scaler):
    """Back off on overflow, grow after a quiet interval.

    ::

        overflow: quiet = 0; if the share of overflows since the last change of scale is above
                  tolerance: hysteresis -= 1; from 0 on: scale = max(min_scale, scale * backoff_factor)
        else:     quiet += 1; at growth_interval: scale = min(max_scale, scale * growth_factor)
                  quiet = 0, hysteresis refilled

    With the defaults this is ``torch.amp.GradScaler``, bounded; hysteresis is DeepSpeed's, Apex' and
    Megatron's: once it is used up, each overflow lowers the scale, until a growth refills it. With
    ``consecutive_hysteresis``, DeepSpeed's, every finite step refills it: rare single overflows skip
    their steps and never lower the scale.
    """

    name: ClassVar[str] = "backoff"
    label: ClassVar[str] = "Backoff"
    needs_absmax: ClassVar[bool] = False

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = LARGEST_SCALE
    tolerance: float = 0.0
    consecutive_hysteresis: bool = False
    current: float | None = state(None)
    quiet: int = state(0)
    tolerated: int = state(0)
    steps_since: int = state(0)
    overflows_since: int = state(0)

    def __post_init__(self) -> None:
        """Refuse settings out of range or against each other."""
        check_positive(
            self, "init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"
        )
        check_whole(self, "growth_interval", "hysteresis")
        if isinstance(self.tolerance, bool) or not 0 <= self.tolerance < 1:
            raise UsageError(f"tolerance must be a share from 0 to below 1, not {self.tolerance!r}")
        refill: object = self.consecutive_hysteresis  # a plan may hold anything
        if not isinstance(refill, bool):
            raise UsageError(f"consecutive_hysteresis must be true or false, not {refill!r}")
        if self.growth_factor <= 1:
            raise UsageError(f"growth_factor must be above 1, not {self.growth_factor!r}")
        if self.backoff_factor >= 1:
            raise UsageError(f"backoff_factor must be below 1, not {self.backoff_factor!r}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise UsageError(
                f"init_scale {self.init_scale:,.12g} must lie between {self.min_scale:,.12g} "
                f"(min_scale) and {self.max_scale:,.12g} (max_scale)"
            )

    @property
    def scale(self) -> float:
        """``init_scale`` until an overflow or a quiet interval changes it."""
        return self.init_scale if self.current is None else self.current

    @property
    def floor(self) -> float:
        """``min_scale``."""
        return self.min_scale

    def adjust(self, absmax: float) -> "Backoff":
        """Count the step, and back off or grow where a count is full."""
        steps = self.steps_since + 1
        if absmax and overflows(absmax, self.scale):  # nothing is asked of the many steps with 0
            count = self.overflows_since + 1
            if count / steps <= self.tolerance:
                return self.moved(quiet=0, steps_since=steps, overflows_since=count)
            if self.tolerated + 1 < self.hysteresis:
                return self.moved(
                    quiet=0, tolerated=self.tolerated + 1, steps_since=steps, overflows_since=count
                )
            lower = max(self.min_scale, self.scale * self.backoff_factor)
            return self._rescaled(lower).moved(tolerated=self.tolerated)
        if self.quiet + 1 < self.growth_interval:
            tolerated = 0 if self.consecutive_hysteresis else self.tolerated
            return self.moved(quiet=self.quiet + 1, tolerated=tolerated, steps_since=steps)
        return self._rescaled(min(self.max_scale, self.scale * self.growth_factor))

    def _rescaled(self, scale: float) -> "Backoff":
        return self.moved(current=scale, quiet=0, tolerated=0, steps_since=0, overflows_since=0)

    @classmethod
    def proposals(cls, found: ScaleRange) -> "Iterator[Backoff]":
        """The same start with ever shorter growth intervals."""
        least = min(1.0, found.first)
        for interval in INTERVALS:
            yield cls(
                found.first, growth_interval=interval, min_scale=least, max_scale=LARGEST_SCALE
            )

    def describe(self) -> str:
        """With its growth interval."""
        return f"{self.label}({self.growth_interval})"
