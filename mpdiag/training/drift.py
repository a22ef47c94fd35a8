"""An alarm when live gradients leave what the recording predicted.

A plan is as good as its recording. The watch compares what a trainer sees anyway, skips, and now and
then a look at the gradients themselves, with the figures the plan was made from.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.training.gradients import arithmetic as sweeps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mpdiag.plan import PrecisionPlan

LOOK_EVERY = 50
WINDOW = 200
ALLOWED_OCTAVES = 2.0
"""Growth of the largest gradient beyond the recorded one that a plan's headroom covers."""
ALLOWED_ZEROS = 0.25
"""Further share of gradients that are zero before it is an alarm."""
SURPRISE = 1e-4
"""How unlikely so many skips must be, if the plan were right."""


@dataclass(frozen=True)
class Alarm:
    """Something that the recording did not predict.

    Attributes:
        alarm: ``overflow``, ``magnitude`` or ``underflow``.
        step: When it was seen.
        predicted, observed: The figure, by the plan and now.
        message: A sentence.
    """

    alarm: str
    step: int
    predicted: float
    observed: float
    message: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class DriftWatch:
    """Watches one training; each kind of alarm is raised once."""

    def __init__(self, plan: PrecisionPlan, say: Callable[[str], None] | None = None) -> None:
        self._say = say or _warn
        self._evidence = plan.loss_scale.evidence
        self._skips: deque[bool] = deque(maxlen=WINDOW)
        self.alarms: list[Alarm] = []

    def due(self, step: int) -> bool:
        """Whether to look at the gradients of this step."""
        return step % LOOK_EVERY == 0 and "weight_grad_absmax" in self._evidence

    def note_skip(self, step: int, skipped: bool) -> Alarm | None:
        """Count skips against the predicted rate."""
        self._skips.append(skipped)
        if "predicted_overflow_rate" not in self._evidence:  # a plan that nothing was recorded for
            return None
        rate = float(self._evidence["predicted_overflow_rate"])
        count = sum(self._skips)
        if not skipped or count < 3 or _tail(count, len(self._skips), rate) > SURPRISE:
            return None
        observed = count / len(self._skips)
        return self._raise(
            Alarm(
                "overflow",
                step,
                rate,
                observed,
                f"{count} of the last {len(self._skips)} steps overflowed, where the recording "
                f"predicted {rate:.2%}: record again and analyze",
            )
        )

    def look(self, step: int, found: Sequence[Tensor]) -> Alarm | None:
        """Compare unscaled gradients with the recorded ones.

        Args:
            step: The present step.
            found: The gradients, finite and unscaled, before clipping.
        """
        values = [sweeps.values_of(g) for g in found]
        top = max(float(n) for n in sweeps.norms(values, math.inf))
        recorded = float(self._evidence["weight_grad_absmax"])
        if recorded > 0 and top > recorded * 2**ALLOWED_OCTAVES:
            return self._raise(
                Alarm(
                    "magnitude",
                    step,
                    recorded,
                    top,
                    f"gradients reach {top:.3g}, {math.log2(top / recorded):.1f} octaves beyond the "
                    f"recorded {recorded:.3g}: the scale may overflow soon; record again",
                )
            )
        size = sum(v.numel() for v in values)
        zero = sum(v.numel() - int(torch.count_nonzero(v)) for v in values) / max(1, size)
        predicted = float(self._evidence.get("weight_grad_zero_after", 1.0))
        if zero > predicted + ALLOWED_ZEROS:
            return self._raise(
                Alarm(
                    "underflow",
                    step,
                    predicted,
                    zero,
                    f"{zero:.0%} of the gradients are zero, where the recording predicted "
                    f"{predicted:.0%}: a larger loss scale may be needed; record again",
                )
            )
        return None

    def _raise(self, alarm: Alarm) -> Alarm | None:
        if any(a.alarm == alarm.alarm for a in self.alarms):
            return None
        self.alarms.append(alarm)
        self._say(f"step {alarm.step}: {alarm.message}")
        return alarm


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=6)


def _tail(count: int, size: int, rate: float) -> float:
    """The chance of at least ``count`` of ``size`` events of this rate (Poisson)."""
    expected = max(rate * size, 1e-3)
    below = sum(
        math.exp(-expected + k * math.log(expected) - math.lgamma(k + 1)) for k in range(count)
    )
    return max(0.0, 1 - below)
