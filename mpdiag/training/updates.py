"""How optimizers are stepped: once, or with a closure; what can be undone; steps past the trainer."""

import copy
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from mpdiag.training.arguments import inside
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.judgement import NO_CLIP, Clip, JudgedGradients, norms, values_of
from mpdiag.training.results import NonFinite, NonFiniteKind, StepResult
from mpdiag.training.scaling import parameters_of
from mpdiag.training.skips.diagnosis import FailedStep, kind_of, non_finite
from mpdiag.training.stepping import (
    StepContext,
    gradients_held,
    judge,
    skip_step,
    stop_at_misfits,
    taken_step,
)

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

_PAST = (
    "optimizer.step() was called without MixedPrecision: nothing was scaled, checked or logged; call "
    "mp.step(loss) instead of loss.backward() and optimizer.step()"
)
_OTHER = (
    "an optimizer that MixedPrecision does not know stepped on gradients of its backward pass: they "
    "were not unscaled, checked or logged; give MixedPrecision all optimizers, or call "
    "mp.add_optimizer(optimizer) at levels O0 and O1"
)


class _Steps(threading.local):
    """How many steps of trainers are under way in this thread."""

    under_way = 0


_steps = _Steps()


class StepGuard:
    """Warns once if a loop steps past its trainer, which nothing else would show.

    It may step one of the trainer's optimizers itself, or another, made later, on gradients that wait
    for the trainer.

    Args:
        optimizers: The trainer's.
        waiting: Returns the trainer's parameters while their gradients wait for a step, else none.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], waiting: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._said: set[str] = set()
        self._waiting = waiting
        self._ours: set[int] = set()
        self._unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.watch(optimizers)
        self._handle = register_optimizer_step_pre_hook(self._before)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """These are the trainer's, too."""
        self._ours.update(id(one) for o in optimizers for one in inside(o))

    def __enter__(self) -> None:
        """Steps inside this context are the trainer's own, and no other trainer's guard asks."""
        _steps.under_way += 1

    def __exit__(self, *_exception: object) -> None:
        """They are over."""
        _steps.under_way -= 1

    def release(self) -> None:
        """Remove the hook; a second call does nothing."""
        self._handle.remove()

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if _steps.under_way:
            return
        if id(optimizer) in self._ours:
            message = _PAST
        elif self._uses_waiting(optimizer):
            message = _OTHER
        else:
            return
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=loop_stacklevel())

    def _uses_waiting(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps on gradients that wait for the trainer."""
        if _OTHER in self._said or optimizer in self._unrelated:
            return False
        waiting = set(map(id, self._waiting()))
        if not waiting:
            return False
        held = [p for p in parameters_of(optimizer) if id(p) in waiting]
        if not held:
            self._unrelated.add(optimizer)
        return any(p.grad is not None for p in held)


class Transaction:
    """A copy of what some optimizers hold; it takes their memory once more while it exists."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._weights = [(p, p.detach().clone()) for o in optimizers for p in parameters_of(o)]
        self._states = [{p: _copied(s) for p, s in o.state.items()} for o in optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and optimizer states."""
        for parameter, value in self._weights:
            parameter.copy_(value)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)

    def has_moved(self) -> bool:
        """Whether a weight is another than it was."""
        return any(not torch.equal(parameter, value) for parameter, value in self._weights)

    def non_finite_state(
        self, names_of: Callable[[Sequence[Tensor]], list[str]]
    ) -> list[tuple[str, NonFiniteKind]]:
        """Parameters whose optimizer state is not finite, each with ``NaN`` or ``Inf``."""
        return [
            (names_of([parameter])[0], kind)
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for value in tree_leaves(dict(state))
            if isinstance(value, Tensor) and (kind := kind_of(value))
        ]


def _copied(state: Any) -> Any:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def update_weights(
    context: StepContext,
    chosen: Sequence[Optimizer],
    guard: StepGuard,
    held: Sequence[Tensor],
    options: Mapping[str, Any] = NO_OPTIONS,
) -> NonFinite | None:
    """Step the optimizers; an update that does not fit the weights' format is undone and named.

    Args:
        context: The trainer's parts.
        chosen: The optimizers.
        guard: Knows that the trainer steps them.
        held: What they update.
        options: What their ``step`` is given.

    Raises:
        TrainingDiverged: If a master grew beyond what the model can hold; on an accelerator, one that
            does is found in the next step, which waits for the device anyway.
        UsageError: If an optimizer steps tensors that masters replaced.
    """
    wrapped, precision = context.wrapped, context.wrapped.precision
    low = precision.low_precision_model and not precision.master_weights
    undo = Transaction(chosen) if low else None
    with context.casting.update():
        for optimizer in chosen:
            with guard, context.watch.watching(optimizer):
                optimizer.step(**options)
    torch.clear_autocast_cache()
    if undo is not None and not _fits(chosen, held):
        bad = non_finite(wrapped.names_of(held), [p.detach() for p in held])
        bad = bad or undo.non_finite_state(wrapped.names_of)
        if bad:
            undo.restore()
            return NonFinite(bad[0][0], bad[0][1], "weights")
    step = context.monitor.steps
    stop_at_misfits(wrapped, context.masters.give_weights_later_checked(held, step), step)
    return None


def _fits(chosen: Sequence[Optimizer], held: Sequence[Tensor]) -> bool:
    """Whether weights and states are finite, as far as a norm of each shows; waits once."""
    states = [
        value
        for optimizer in chosen
        for state in optimizer.state.values()
        for value in tree_leaves(dict(state))
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    sizes = norms([values_of(t.detach()) for t in (*held, *states)], 2.0)
    return bool(torch.isfinite(torch.stack([n.to(sizes[0].device) for n in sizes])).all())


class _EvaluationSkipped(Exception):
    """Leaves an optimizer's step from inside a closure."""

    def __init__(self, result: StepResult) -> None:
        super().__init__(result.reason)
        self.result = result


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of a closure, which has left gradients.

    Attributes:
        returned: What the optimizer is given.
        loss: The unscaled loss; None if it is not known.
        known_bad: Whether gradients were seen earlier that were not finite.
    """

    returned: Any
    loss: float | None
    known_bad: bool = False


def step_with_closure(
    context: StepContext,
    optimizer: Optimizer,
    step: Callable[[Callable[..., Any]], Any],
    evaluate: Callable[..., Evaluation],
    *,
    clip: Clip = NO_CLIP,
) -> tuple[StepResult | None, Any]:
    """A step of an optimizer that evaluates its loss again and again, such as LBFGS.

    Every evaluation's gradients are judged before the optimizer sees them; what is not finite undoes
    the whole step. The scaler learns of the largest gradient of all evaluations.

    Args:
        context: The trainer's parts.
        optimizer: The optimizer.
        step: Its ``step``, taking a closure.
        evaluate: Runs forward and backward passes once.
        clip: Limits on the gradients of each evaluation.

    Returns:
        The result, None if the closure was never called or left no gradient; and what ``step``
        returned, None if it was left on the way.
    """
    scaling = context.scaling
    undo = Transaction([optimizer])
    taken: list[tuple[float | None, JudgedGradients]] = []

    def closure(*args: Any, **kwargs: Any) -> Any:
        evaluation = evaluate(*args, **kwargs)
        held, gradients = gradients_held(parameters_of(optimizer))
        if not held:
            return evaluation.returned
        scale = scaling.scale
        loss = evaluation.loss  # later ones may be infinite: a line search goes back from there
        bad = not taken and loss is not None and not math.isfinite(loss)
        judged = judge(
            context, held, gradients, scale=scale, clip=clip, known_bad=evaluation.known_bad or bad
        )
        if not judged.finite:
            undo.restore()
            failed = FailedStep(held, scale, loss, scaling.root, judged.bad_ranks)
            raise _EvaluationSkipped(skip_step(context, [optimizer], failed, judged))
        taken.append((loss, judged))
        return evaluation.returned

    returned: Any = None
    try:
        with context.casting.off():
            returned = step(closure)
    except _EvaluationSkipped as skip:
        return skip.result, None
    if not taken:
        return None, returned
    context.watch.closure_evaluated(optimizer, moved=undo.has_moved)
    (loss, judged), scale = taken[0], scaling.scale
    if not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
        undo.restore()
        unknown = replace(judged, norm=math.nan)
        return skip_step(context, [optimizer], FailedStep([], scale, loss), unknown), returned
    scaling.note_taken([optimizer], max(j.absmax for _, j in taken), scale)
    return taken_step(context, scale, loss, judged.norm), returned
