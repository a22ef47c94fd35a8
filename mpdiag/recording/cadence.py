"""Which steps are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from mpdiag.errors import UsageError

DENSE_STEPS = 20
SPARSE_EVERY = 20


@dataclass(frozen=True)
class Cadence:
    """A rule that picks steps.

    Attributes:
        every: Record exactly the steps divisible by this. None: the first ``DENSE_STEPS`` steps,
            where training is most volatile, then every ``SPARSE_EVERY``-th.
        max_steps: Stop after so many recorded steps; None: never.
    """

    every: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no positive integer."""
        for name in ("every", "max_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                message = f"{name} must be a whole number of at least 1, not {value!r}"
                raise UsageError(message)

    def records(self, step: int, recorded: int) -> bool:
        """Whether to record this step (0 is the first), after ``recorded`` recorded ones."""
        if self.max_steps is not None and recorded >= self.max_steps:
            return False
        if self.every is not None:
            return step % self.every == 0
        return step < DENSE_STEPS or step % SPARSE_EVERY == 0
