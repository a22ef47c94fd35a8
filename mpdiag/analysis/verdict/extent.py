"""What of a training a recording holds: its steps, and the shares of its model that were seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.analysis.scaling.windows import unseen_windows
from mpdiag.display.wording import counted, percent
from mpdiag.runs import coverage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mpdiag.runs.run import Run

_SHOWN_REASONS = 2


@dataclass(frozen=True)
class Extent:
    """What was recorded, beside what there was.

    Attributes:
        recorded, seen: Steps; ``seen`` is 0 where the run does not say.
        first, last: The first and the last recorded step; -1 without any.
        model: What of the model was seen; None where the run does not say.
        unseen_parts: Late parts of the training of which no step was recorded.
        reasons: Why gradients were not seen, each with how many, the most frequent first.
    """

    recorded: int
    seen: int
    first: int
    last: int
    model: coverage.Coverage | None
    unseen_parts: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...]

    def steps(self) -> str:
        """The recorded steps: ``39 of 400 steps``."""
        if self.seen > self.recorded:
            return f"{self.recorded:,} of {self.seen:,} steps"
        return counted(self.recorded, "step")

    def seen_of_the_model(self) -> str:
        """What of the model was seen, in a phrase; empty if all of it was, or nothing is known."""
        model = self.model
        parts = []
        if model is not None and model.gradients_unseen:
            share = percent(1 - model.gradients_unseen)
            parts.append(f"the gradients of {share} of the trained parameters")
        if model is not None and model.activation_gradients_unseen:
            seen, of = model.activation_gradients_seen, model.activation_gradients
            parts.append(f"the output gradients of {seen:,} of {of:,} modules")
        return " and ".join(parts)

    def unseen_of_the_model(self) -> str:
        """What of the model was not seen, with the reasons, in a clause; empty as above."""
        model = self.model
        parts = []
        if model is not None and model.gradients_unseen:
            parts.append(
                f"the gradients of {percent(model.gradients_unseen)} of the trained parameters"
            )
        if model is not None and model.activation_gradients_unseen:
            missing = model.activation_gradients - model.activation_gradients_seen
            parts.append(
                f"the output gradients of {missing:,} of {model.activation_gradients:,} modules"
            )
        why = ", ".join(f"{reason} ({n:,})" for reason, n in self.reasons[:_SHOWN_REASONS])
        return " and ".join(parts) + (f" ({why})" if parts and why else "")


def extent_of(run: Run, steps: NDArray[np.int64]) -> Extent:
    """What a run holds.

    Args:
        run: The run.
        steps: int64 (n,), the recorded steps with gradients, in order.
    """
    length = int(run.meta.get("steps_seen") or 0)
    return Extent(
        recorded=max(steps.size, int(run.meta.get("steps_recorded") or 0)),
        seen=length,
        first=int(steps[0]) if steps.size else -1,
        last=int(steps[-1]) if steps.size else -1,
        model=coverage.coverage_of(run),
        unseen_parts=unseen_windows(steps, length),
        reasons=_reasons(run),
    )


def _reasons(run: Run) -> tuple[tuple[str, int], ...]:
    """Why gradients of parameters and of outputs were not recorded, the most frequent reason first."""
    found: dict[str, int] = {}
    for item in (run.meta.get("coverage") or {}).get("not_recorded") or []:
        reason = str(item.get("reason") or "")
        needed = reason not in (coverage.FROZEN, coverage.UNTRAINED)
        if item.get("what") in ("parameter", "activation_grad") and needed:
            found[reason] = found.get(reason, 0) + 1
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))
