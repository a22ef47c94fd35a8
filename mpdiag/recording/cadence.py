"""Which steps are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from mpdiag.errors import UsageError

DENSE_STEPS = 20
SPARSE_EVERY = 20
BUDGET = 0.02


@dataclass(frozen=True)
class Cadence:
    """A rule that picks steps.

    Attributes:
        every: Record exactly the steps divisible by this. None: the first ``DENSE_STEPS`` steps,
            where training is most volatile, then every ``SPARSE_EVERY``-th.
        max_steps: Stop after so many recorded steps; None: never.
        budget: Share of step time that recording may take before steps are left out; None: any.
            With ``every`` it does not apply.
    """

    every: int | None = None
    max_steps: int | None = None
    budget: float | None = BUDGET

    def __post_init__(self) -> None:
        """Refuse what is no positive integer."""
        for name in ("every", "max_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                message = f"{name} must be a whole number of at least 1, not {value!r}"
                raise UsageError(message)
        budget: object = self.budget  # callers without a type checker pass anything
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1
        ):
            message = f"budget must be a share of step time, over 0 and up to 1, not {budget!r}"
            raise UsageError(message)

    def records(self, step: int, recorded: int, thin: int = 1) -> bool:
        """Whether to record this step (0 is the first), after ``recorded`` recorded ones.

        Args:
            step: Its number.
            recorded: How many were recorded before.
            thin: Record so many times fewer; an explicit ``every`` is exact all the same.
        """
        if self.max_steps is not None and recorded >= self.max_steps:
            return False
        if self.every is not None:
            return step % self.every == 0
        return step % (thin if step < DENSE_STEPS else SPARSE_EVERY * thin) == 0
