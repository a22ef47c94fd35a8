"""Says, while a script trains by a plan, what has changed since the plan's recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mpdiag.tracing.conditions import (
    Change,
    OptimizerSettings,
    TrainingConditions,
    changes,
    release,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


class PlanAge:
    """Compares a script's training with the recording of its plan, each change once.

    Args:
        recorded: The conditions of the recording; None where the plan does not have them.
        say: Takes a sentence.

    Attributes:
        wants_input: Whether the model's first input is still to be compared.
    """

    def __init__(self, recorded: TrainingConditions | None, say: Callable[[str], None]) -> None:
        self._recorded = recorded
        self._say = say
        self._known: set[Change] = set()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self.wants_input = recorded is not None

    def called(self, args: Any) -> None:
        """The model that was recorded as a whole is called to train, for the first time."""
        from mpdiag.recording.counting.tensors import tensors_in
        from mpdiag.tracing.names import shapes_of

        self.wants_input = False
        inputs = shapes_of(tensors_in(args)) or [[]]
        self._compare(TrainingConditions(first_input=tuple(inputs[0])))

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self._recorded is None or optimizer in self._stepped:
            return
        from mpdiag.recording.run_folder import describe_optimizer
        from mpdiag.runs.provenance import versions

        first, described = not self._stepped, describe_optimizer(optimizer)
        self._stepped.add(optimizer)
        self._compare(
            TrainingConditions(
                (OptimizerSettings.of(described, described.get("lr")),),
                torch=release(versions().get("torch", "")) if first else "",
            )
        )

    def _compare(self, now: TrainingConditions) -> None:
        if self._recorded is None:
            return
        for change in changes(self._recorded, now):
            if change not in self._known:
                self._known.add(change)
                self._say(f"{change}: {change.touches} may no longer fit")
