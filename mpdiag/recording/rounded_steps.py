"""What rounding leaves of an optimizer's step in half precision: states that stay, weights that move."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch.optim import Optimizer

from mpdiag.recording.counting.tensors import some_of
from mpdiag.recording.moving_rates import moving_rates
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.runs.precision import Observed
from mpdiag.tracing.names import Subjects
from mpdiag.tracing.precision import HALF

STATES = 32
"""Of an optimizer at most, that are compared before and after a recorded step."""


class RoundedSteps(StepListener):
    """Compares states in half precision before and after recorded steps, and reads weights' rates.

    Args:
        subjects: What is recorded.
        optimizers: All that step; they may become more.
        failed: Told what failed; after that nothing more is looked at.
    """

    def __init__(
        self,
        subjects: Subjects,
        optimizers: Sequence[Optimizer],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._subjects = subjects
        self._optimizers = optimizers
        self._failed = failed
        self._looks = True
        self._before: dict[tuple[str, str, int], torch.Tensor] = {}
        self._still: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._rates: dict[tuple[str, str], float] = {}
        self._step = 0
        self._due = 0

    def step_began(self, step: Step) -> None:
        """Keep some states, if the step is recorded."""
        self._before = {}
        if self._looks and step.recorded:
            self._safely(lambda: self._before.update(self._states()))

    def step_ended(self, step: Step) -> None:
        """Compare them."""
        if self._looks and step.recorded:
            self._safely(lambda: self._look(step.number))

    def found(self) -> tuple[Observed, ...]:
        """The share of each state's elements that stayed in the last recorded step, and the rates."""
        step = self._step
        return (
            *(
                Observed("still-state", names, step, step, still / live, live)
                for names, (still, live) in self._still.items()
                if live
            ),
            *(Observed("moving-rate", n, step, step, r) for n, r in self._rates.items()),
        )

    def _safely(self, look: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                look()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._looks = False
            self._failed("looking at what rounding leaves of a step", error)

    def _states(self) -> Iterator[tuple[tuple[str, str, int], torch.Tensor]]:
        """Elements of the first states in half precision, by optimizer, name and parameter."""
        known = self._subjects.parameters
        for optimizer in self._optimizers:
            states = (
                ((type(optimizer).__name__, str(name), id(parameter)), values)
                for parameter, state in optimizer.state.items()
                for name, value in (state.items() if id(parameter) in known else ())
                if isinstance(value, torch.Tensor) and value.dtype in HALF
                if (values := some_of(value)) is not None
            )
            yield from islice(states, STATES)

    def _look(self, step: int) -> None:
        self._step = step
        self._still.clear()
        after = dict(self._states()) if self._before else {}
        for key, values in self._before.items():
            now = after.get(key)
            # A state of which no element has changed was left alone by this step.
            if now is not None and now.shape == values.shape and not torch.equal(now, values):
                live = values != 0
                counts = self._still[key[:2]]
                counts[0] += int(((now == values) & live).sum())
                counts[1] += int(live.sum())
        if step >= self._due:
            self._due = 2 * step
            for optimizer in self._optimizers:
                for share, rate in moving_rates(optimizer):
                    self._rates[type(optimizer).__name__, f"{share:g}"] = rate
