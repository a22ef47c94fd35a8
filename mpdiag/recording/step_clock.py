"""When a training step begins and ends, and whether it is recorded.

PyTorch has no notion of a step. The clock hears what happens (a forward pass begins, a gradient
arrives, an optimizer has stepped) and decides; listeners hear of it and never ask each other::

    forward pass of a model       pass_began, forward_began
    backward()                    pass_began; then, for each gradient, backward_reached
    optimizer.step                optimizer_begins, optimizer_stepped
    → the step is over            step_ended, then step_began of the next one

A step is what one update of the weights needs: the forward and backward passes before it, and the
update. It ends when an optimizer has stepped, however many backward passes came before. Optimizers
that step one after another, with no forward pass and no ``backward()`` between them, share a step;
with several optimizers it therefore ends with the first of these after an update. So a GAN's turn of
the loop has two steps, and a model whose parameters two optimizers share has one. An optimizer that
steps within the backward pass ends the step when that pass is over. With no optimizer, a step ends
when a model is called again. ``mpdiag train`` counts alike (``training.monitor``).

Whether to record is decided for a *round*: the steps in which each optimizer that takes part has stepped
once. If it were decided for a step, ``every=2`` would show one half of a GAN.

A *phase* begins, after the first step, where an optimizer joins, steps for the first time or is given
further parameters, as in fine-tuning. The pace is asked for its first steps, too.

A clock hears of its own training: of the threads in which it was started, was given models, or one
of its models was called. What other threads of the process call and differentiate is another training's.

Nothing here needs torch: what to ask about backward passes is handed in.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol

_LONGEST_ROUND = 8
"""Steps after which an optimizer is not waited for: a critic often has five to its generator's one."""
MOST_PHASES = 8
"""Phases whose first steps the pace is asked for: some loops make an optimizer in every turn."""
_APART = 10
"""Rounds from one phase to the next at least; the training itself is the first one."""


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        number: From 0.
        recorded: Whether it is recorded.
        accumulating: Whether steps consist of several backward passes, as the last recorded one did.
        opens: Whether it is the first recorded one of a phase that began after the first step.
    """

    number: int
    recorded: bool
    accumulating: bool
    opens: bool = False


@dataclass
class OptimizerSteps:
    """How often an optimizer has stepped, and how often in a recorded step.

    Attributes:
        taken, recorded: See above.
        evaluations: How often it has evaluated a closure.
        size: How many parameters it steps; 0 where that is not known.
    """

    taken: int = 0
    recorded: int = 0
    evaluations: int = field(default=0, compare=False)
    size: int = field(default=0, compare=False)


class StepListener:
    """Hears from the clock; what a listener does not override, it ignores."""

    def step_began(self, step: Step) -> None:
        """A step begins; it has its number, and whether to record it is decided."""

    def forward_began(self) -> None:
        """A model was called, gradients on, outside any backward pass."""

    def backward_reached(self) -> None:
        """A gradient arrived in a recorded step."""

    def evaluation_ended(self) -> None:
        """An optimizer has evaluated its closure, perhaps not for the last time in this step."""

    def optimizer_begins(self) -> None:
        """An optimizer is about to step."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer stepped, or a scaler skipped its step; the step has not ended yet."""

    def step_ended(self, step: Step) -> None:
        """A step is over; the next one has not begun."""

    def stopped(self) -> None:
        """Nothing will be recorded any more: remove what was placed."""


class Pace(Protocol):
    """Says which steps to record."""

    def wants(self, step: int) -> bool:
        """Whether to record a step; asked once, when it begins.

        Args:
            step: The number of its round, which is its own where one optimizer steps.
        """

    def wants_in_phase(self, rounds: int) -> bool:
        """Whether to record a step in any case, so many rounds after a phase began."""

    def turn(self, ended: Step) -> AbstractContextManager[None]:
        """A context in which listeners hear that a step has ended and the next one has begun."""


class StepClock:
    """Decides when a step begins and ends.

    Args:
        optimizers: The optimizers of the training, if any.
        in_backward: Whether this thread is inside a backward pass.
        after_backward: Calls something when the present backward pass is over.

    Attributes:
        number: Number of the present step.
        round: Number of the present round.
        recording: Whether it is recorded.
        active: Whether events count at all: from ``start`` to ``mute``, ``stop`` or ``close``.
        running: Whether steps are counted: from ``start`` to ``close``.
        due: Whether the present step ends with the next forward or backward pass.
        micro: Number of the present forward pass of a model within the step.
        evaluating: Whether an optimizer evaluates a closure.
        evaluation: Which evaluation of its closure is under way or was the last one, from 1; 0 where
            there was none.
    """

    def __init__(
        self,
        optimizers: Iterable[object],
        in_backward: Callable[[], bool],
        after_backward: Callable[[Callable[[], None]], None],
    ) -> None:
        self.number = self.round = 0
        self.recording = self.active = self.running = self.due = False
        self.micro = 0
        self.evaluating = False
        self.evaluation = 0
        self._in_backward = in_backward
        self._after_backward = after_backward
        self._pace: Pace  # from ``attach`` on
        self._listeners: tuple[StepListener, ...] = ()
        self._optimizers = {id(o): OptimizerSteps() for o in optimizers}
        self._stepped: set[int] = set()  # optimizers that have stepped in the present step
        self._taking_part = set(self._optimizers)  # in rounds
        self._in_round: set[int] = set()  # optimizers that have stepped in the present round
        self._steps_of_round = 0
        self._last_round: set[int] = set()  # optimizers that have stepped in the round before
        self._patience = _LONGEST_ROUND
        self._phases: list[int] = []  # rounds in which phases began
        self._phase_waits = self._opens = False
        self._threads: set[int] = set()  # of this training
        self._calls: dict[int, int] = {}  # of each model in this step
        self._forwards = 0
        self._backwards: set[int] = set()  # forward passes that a gradient followed
        self._accumulating = False
        self._ends_after_backward = False
        self._differentiated = False

    # -- its life ----------------------------------------------------------------------------------

    def attach(self, listeners: Iterable[StepListener], pace: Pace) -> None:
        """Tell these listeners from now on, in this order, and record the steps that ``pace`` wants."""
        self._listeners = tuple(listeners)
        self._pace = pace

    def start(self, missed: int = 0) -> None:
        """Count steps, and hear events, from now on; ``begin`` begins the first one after the missed."""
        self.number = self.round = missed
        self.join()
        self.active = self.running = True

    def join(self) -> None:
        """Hear, from now on, what happens in this thread, too."""
        self._threads.add(get_ident())

    def begin(self) -> None:
        """Begin the step of the present number."""
        self._calls.clear()
        self._forwards = 0
        self._backwards = set()
        self._stepped.clear()
        self._differentiated = False
        self.micro = 0
        self.due = False
        self.recording = self.active and self._is_wanted()
        self._opens = self.recording and self._phase_waits
        step = self.present
        for listener in self._listeners:
            listener.step_began(step)

    def _is_wanted(self) -> bool:
        """Whether the pace wants the present step.

        A phase begins with the first step that can be recorded: a thin pace must not miss its only one.
        """
        if self._phase_waits:
            self._phases[-1] = self.round
        since = self.round - self._phases[-1] if self._phases else None
        return self._pace.wants(self.round) or (
            since is not None and self._pace.wants_in_phase(since)
        )

    def mute(self) -> None:
        """Record nothing any more; hooks stay where they are and do nothing."""
        self.active = self.recording = False

    def stop(self) -> None:
        """Record nothing any more, and let listeners remove what they have placed."""
        self.mute()
        for listener in self._listeners:
            listener.stopped()

    def close(self) -> None:
        """Count no more steps."""
        self.running = False

    def release(self) -> None:
        """Keep no listener and no pace alive any more, nor the models that they hold."""
        self._listeners = ()
        vars(self).pop("_pace", None)

    def adopt(self, optimizers: Iterable[object]) -> None:
        """Count the steps of these optimizers too, from the present step on."""
        self.join()
        for optimizer in optimizers:
            self._optimizers.setdefault(id(optimizer), OptimizerSteps())
            self._taking_part.add(id(optimizer))
        self._begin_phase()
        self._reconsider()

    def _begin_phase(self) -> None:
        """Note that something new is stepped from here on, unless a phase has just begun."""
        last = self._phases[-1] if self._phases else 0
        if self.round - last >= _APART and len(self._phases) < MOST_PHASES:
            self._phases.append(self.round)
            self._phase_waits = True

    def _reconsider(self) -> None:
        """Record the present step after all, if it is wanted now and nothing has happened in it."""
        untouched = not (self._forwards or self._backwards or self._stepped or self.due)
        if self.active and self.running and not self.recording and untouched and self._is_wanted():
            self.begin()

    # -- what happens in training ------------------------------------------------------------------

    def pass_began(self) -> None:
        """A module is called, gradients on, or ``backward()``, outside any backward pass.

        A step that is due ends.
        """
        if self.due:
            self.end_step()

    def backward_began(self) -> None:
        """``backward()`` is called, outside any backward pass."""
        self.pass_began()
        self._differentiated = True

    def forward_began(self, model: int) -> None:
        """A whole model is called so; with no optimizer a new forward pass begins a new step."""
        if not self._optimizers and (self._backwards or self._forwards):
            self.end_step()
        self._forwards += 1
        for listener in self._listeners:
            listener.forward_began()
        self.micro = self._calls.get(model, 0)
        self._calls[model] = self.micro + 1

    def backward_reached(self) -> None:
        """A gradient arrived in the present step."""
        self._backwards.add(self.micro)
        for listener in self._listeners:
            listener.backward_reached()

    def optimizer_begins(self, optimizer: object, *, evaluates: bool) -> None:
        """An optimizer is about to step.

        A second step of the same one is no part of the present step. One that evaluates the loss
        itself (``evaluates``) begins a step with its forward pass; some are given a closure that does
        nothing, as by Lightning where the loop calls ``backward()``.
        """
        self._look_at(optimizer)
        if self.due and id(optimizer) in self._stepped:
            self.end_step()
        self.evaluating = evaluates
        if evaluates:
            self.evaluation = 0
            self._reconsider()
        for listener in self._listeners:
            listener.optimizer_begins()

    def _look_at(self, optimizer: object) -> None:
        """Whether a phase begins with this step of an optimizer."""
        steps = self._optimizers.setdefault(id(optimizer), OptimizerSteps())
        groups = getattr(optimizer, "param_groups", ())
        before, steps.size = steps.size, sum(len(group["params"]) for group in groups)
        if steps.taken == 0 or steps.size > before:
            self._begin_phase()

    def evaluation_began(self, optimizer: object) -> None:
        """An optimizer calls the closure that it was given."""
        self.evaluation += 1
        self._optimizers.setdefault(id(optimizer), OptimizerSteps()).evaluations += 1

    def evaluation_ended(self) -> None:
        """The closure has returned."""
        for listener in self._listeners:
            listener.evaluation_ended()

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer stepped, or a scaler skipped its step."""
        self.optimizer_begins(optimizer, evaluates=False)  # a scaler that skips has not said so
        for listener in self._listeners:
            listener.optimizer_stepped(optimizer)
        self._stepped.add(id(optimizer))
        steps = self._optimizers.setdefault(id(optimizer), OptimizerSteps())
        steps.taken += 1
        steps.recorded += self.recording
        if self._in_backward():  # the other optimizers of this step are still to come
            if not self._ends_after_backward:
                self._ends_after_backward = True
                self._after_backward(self.end_step)
        elif self.running and len(self._stepped) < len(self._optimizers):
            self.due = True  # others may step yet: the next forward or backward pass ends it
        else:
            self.end_step()

    def end_step(self) -> None:
        """End the present step and begin the next one."""
        if not self.running:
            return
        ended = self.present
        with self._pace.turn(ended):
            self._ends_after_backward = False
            for listener in self._listeners:
                listener.step_ended(ended)
            if ended.recorded:
                self._accumulating = len(self._backwards) > 1
            self._phase_waits = self._phase_waits and not self._opens
            self.number += 1
            self._count_rounds()
            self.begin()

    def _count_rounds(self) -> None:
        """Whether the round ends with the step that has ended.

        The optimizers of the last round are waited for as long as it took, or for many steps where
        others had stepped in the one before.
        """
        self._in_round |= self._stepped
        self._steps_of_round += 1
        if self._taking_part <= self._in_round or self._steps_of_round >= self._patience:
            alike = self._in_round == self._last_round
            self._patience = self._steps_of_round if alike else _LONGEST_ROUND
            self._taking_part, self._last_round = set(self._in_round), self._in_round
            self._in_round = set()
            self._steps_of_round = 0
            self.round += 1

    # -- questions ---------------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        """Whether this thread is one of the training's."""
        return get_ident() in self._threads

    @property
    def present(self) -> Step:
        """The present step, as listeners hear of it."""
        return Step(self.number, self.recording, self._accumulating, self._opens)

    def steps_of(self, optimizer: object) -> OptimizerSteps:
        """How often an optimizer has stepped."""
        return self._optimizers.get(id(optimizer), OptimizerSteps())

    @property
    def trained(self) -> bool:
        """Whether the present step has come so far that it counts, though nothing has ended it.

        A gradient has arrived in a recorded step, or ``backward()`` was called with no optimizer.
        """
        gradients = self.recording and bool(self._backwards)
        return gradients or (self._differentiated and not self._optimizers)
