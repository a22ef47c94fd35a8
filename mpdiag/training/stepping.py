"""How a step is taken: the order that makes it safe.

::

    scale the loss (in FP32) → backward → gradients to the masters → regularisers →
    judge: finite on all ranks? → unscale → clip → optimizer step, or skip and restore →
    adjust the scale

Functions over a ``StepContext``, the parts that a trainer is made of. ``take_step`` and
``step_with_closure`` serve ``MixedPrecision`` and ``ScriptTrainer`` alike; what differs between the
two, how an optimizer is stepped and where gradients come from, is handed in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.gradients.judgement import (
    NO_CLIP,
    Clip,
    JudgedGradients,
    judge_gradients,
    rank,
    unscale,
)
from mpdiag.training.gradients.scaling import parameters_of
from mpdiag.training.results import NonFinite, StepResult
from mpdiag.training.skips.diagnosis import FailedStep, diagnose, non_finite
from mpdiag.training.weights.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from mpdiag.training.casting import Casting
    from mpdiag.training.gradients.scaling import GradientScaling
    from mpdiag.training.monitor import StepMonitor
    from mpdiag.training.weights.wrapping import Wrapped

Regularizer = Callable[[Mapping[str, Tensor]], Tensor]
Update = Callable[[Sequence[Tensor]], NonFinite | None]
"""Steps optimizers, given the parameters that have gradients; returns what did not fit its format."""


@dataclass(frozen=True, eq=False)
class StepContext:
    """The parts of a trainer.

    Attributes:
        wrapped: Models and optimizers, with their masters and the guard of their buffers.
        casting: The arithmetic of forward passes, backward passes and updates.
        scaling: The loss scale, and which gradients carry it.
        monitor: Counts steps, writes them down, raises alarms.
        device: Where the models are.
        group: The ranks that must agree; None: all.
    """

    wrapped: Wrapped
    casting: Casting
    scaling: GradientScaling
    monitor: StepMonitor
    device: torch.device
    group: Any = None


class _EvaluationSkipped(Exception):
    """Leaves an optimizer's step from inside a closure."""

    def __init__(self, result: StepResult) -> None:
        super().__init__(result.reason)
        self.result = result


# -- gradients before a step -----------------------------------------------------------------------


def run_backward(context: StepContext, loss: Tensor, **options: Any) -> None:
    """Scale a loss and run its backward pass; gradients that wait are brought to the same scale."""
    scaling, wrapped = context.scaling, context.wrapped
    for optimizer in wrapped.optimizers:
        scaling.align(optimizer, lambda o=optimizer: _waiting_gradients(wrapped, o))  # type: ignore[misc]
    adds = any(_waiting_gradients(wrapped, o) for o in wrapped.optimizers)
    scaling.note_loss(loss, adds=adds)
    with context.casting.backward():
        scaling.scaled(loss).backward(**options)


def _waiting_gradients(wrapped: Wrapped, optimizer: Optimizer) -> list[Tensor]:
    """Gradients of an optimizer's parameters, on the masters or still on the model."""
    earlier = wrapped.optimizers[: wrapped.optimizers.index(optimizer)]
    seen = {id(p) for o in earlier for p in parameters_of(o)}  # a parameter may be in several
    held = [p for p in parameters_of(optimizer) if id(p) not in seen]
    return [g for p in held for g in wrapped.masters.gradients_of(p)]


def collect_gradients(wrapped: Wrapped, optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, with the gradients moved to them from the model."""
    if wrapped.precision.master_weights:
        wrapped.masters.adopt()
        wrapped.masters.take_gradients(parameters_of(optimizer))
    held = parameters_of(optimizer)
    for p in held:  # entries that stand for one value twice have no norm yet
        if p.grad is not None and p.grad.layout == torch.sparse_coo:
            p.grad = p.grad.coalesce()
    return held


def unscale_gradients(context: StepContext, optimizer: Optimizer) -> None:
    """Divide an optimizer's gradients by their scale ahead of the step."""
    if context.scaling.is_unscaled(optimizer):
        return
    held = collect_gradients(context.wrapped, optimizer)
    for other in context.wrapped.optimizers:  # a parameter may be in several
        if other is not optimizer and context.scaling.is_unscaled(other):
            done = {id(p) for p in parameters_of(other)}
            held = [p for p in held if id(p) not in done]
    unscale([p.grad for p in held if p.grad is not None], context.scaling.carried(optimizer))
    context.scaling.note_unscaled(optimizer)
    context.wrapped.masters.show_gradients(parameters_of(optimizer))


def prepare_gradients(
    context: StepContext, chosen: Sequence[Optimizer], regularizers: Sequence[Regularizer]
) -> float:
    """Collect gradients and add regularisers; returns the scale still on the gradients."""
    context.wrapped.masters.begin_update(chosen)
    found = [p for o in chosen for p in collect_gradients(context.wrapped, o)]
    held = list(dict.fromkeys(found))
    scales = {context.scaling.carried(o) for o in chosen}
    if len(scales) == 1 and not regularizers:
        return scales.pop()
    for optimizer in chosen:
        unscale_gradients(context, optimizer)
    if regularizers:
        _add_penalties(context, held, regularizers)
    return 1.0


def _add_penalties(
    context: StepContext, held: Sequence[Tensor], regularizers: Sequence[Regularizer]
) -> None:
    """Add the gradients of penalties on the FP32 weights to unscaled gradients."""
    trained = [p for p in held if p.requires_grad]
    named = dict(zip(context.wrapped.names_of(trained), trained, strict=True))
    with torch.enable_grad(), context.casting.off():
        for penalty_of in regularizers:
            parts = torch.autograd.grad(penalty_of(named), trained, allow_unused=True)
            for parameter, part in zip(trained, parts, strict=True):
                if part is not None:
                    before = parameter.grad
                    parameter.grad = part if before is None else before.add_(part)


# -- one step --------------------------------------------------------------------------------------


def take_step(
    context: StepContext,
    chosen: Sequence[Optimizer],
    update: Update,
    *,
    carried: float,
    clip: Clip = NO_CLIP,
    known_bad: bool = False,
    replay: Callable[[], Tensor] | None = None,
) -> StepResult:
    """Judge the gradients, then update weights or skip.

    Args:
        context: The trainer's parts.
        chosen: The optimizers to step, together; gradients are where they look for them.
        update: Steps them.
        carried: The scale that is still on the gradients.
        clip: Limits on the gradients.
        known_bad: Whether gradients were seen earlier that were not finite.
        replay: Returns the loss of the same batch once more, to find the cause of a skip.

    Raises:
        UsageError: If there is no gradient, or ranks disagree on the scale.
        TrainingDiverged: If a weight left the format.
    """
    scaling = context.scaling
    scale = scaling.begun_at(chosen[0])
    found = (p for o in chosen for p in parameters_of(o) if p.grad is not None)
    held = list(dict.fromkeys(found))  # a parameter may be in several optimizers
    judged = _judge(context, held, carried, scale, clip, known_bad, context.monitor.inspect)
    loss = scaling.take_loss()
    if not judged.finite:
        failed = FailedStep(held, scale, loss, scaling.root, judged.bad_ranks)
        return skip_step(context, failed, judged.norm, replay)
    misfit = update(held)
    if misfit is not None:
        return skip_step(context, FailedStep(held, scale, loss, misfit=misfit), judged.norm)
    scaling.note_taken(judged.absmax, scale)
    return _taken(context, scale, loss, judged.norm)


def _judge(
    context: StepContext,
    held: Sequence[Tensor],
    carried: float,
    scale: float,
    clip: Clip,
    known_bad: bool,
    inspect: Callable[[Sequence[Tensor]], None] | None = None,
) -> JudgedGradients:
    gradients = [p.grad for p in held if p.grad is not None]
    if not gradients:
        message = "step() found no gradient: call step(loss), or backward(loss) first"
        raise UsageError(message)
    return judge_gradients(
        gradients,
        context.wrapped.buffers.changed(),
        carried=carried,
        scale=scale,
        device=context.device,
        group=context.group,
        absmax=context.scaling.scaler.needs_absmax,
        known_bad=known_bad,
        clip=clip,
        inspect=inspect,
    )


def _taken(context: StepContext, scale: float, loss: float | None, norm: float) -> StepResult:
    return StepResult(
        skipped=False,
        reason="",
        step=context.monitor.steps,
        scale=scale,
        next_scale=context.scaling.scale,
        loss=loss,
        gradient_norm=norm,
        rank=rank(),
    )


def skip_step(
    context: StepContext,
    failed: FailedStep,
    norm: float,
    replay: Callable[[], Tensor] | None = None,
) -> StepResult:
    """Restore buffers, find the cause and adjust the scale.

    One skip alone is how a dynamic scale finds its value: the operation at fault is looked for from
    the second skip in a row on.
    """
    monitor = context.monitor
    with monitor.share.paused():
        diagnosis = diagnose(
            context.wrapped, context.casting, failed, replay, locate=monitor.in_a_row > 0
        )
    context.scaling.note_skipped()
    return StepResult(
        skipped=True,
        reason=diagnosis.reason,
        operation=diagnosis.operation,
        step=monitor.steps,
        scale=failed.scale,
        next_scale=context.scaling.scale,
        loss=failed.loss,
        gradient_norm=norm,
        non_finite=diagnosis.found,
        cause=diagnosis.cause,
        rank=rank(),
    )


def note_step(
    context: StepContext,
    chosen: Sequence[Optimizer],
    result: StepResult,
    *,
    shares_step: bool = False,
) -> None:
    """Count a step and make ready for the next.

    Args:
        context: The trainer's parts.
        chosen: The optimizers that stepped.
        result: Whether it was taken or skipped, and why.
        shares_step: Whether it belongs to the step before; see ``StepMonitor.note_step``.

    Raises:
        TrainingDiverged: If too many steps in a row were skipped.
    """
    context.wrapped.fresh = True
    context.wrapped.masters.remember(chosen)
    context.scaling.root = None
    if result.skipped:
        for optimizer in chosen:  # a scheduler stepped after a skip must not complain of the order
            optimizer._opt_called = True  # type: ignore[attr-defined]
    floor = context.scaling.scaler.floor
    context.monitor.note_step(result, floor, shares_step=shares_step)


# -- updates ---------------------------------------------------------------------------------------


def update_weights(
    context: StepContext, chosen: Sequence[Optimizer], guard: StepGuard, held: Sequence[Tensor]
) -> NonFinite | None:
    """Step the optimizers; an update that does not fit the weights' format is undone and named.

    Raises:
        TrainingDiverged: If a master grew beyond what the model can hold.
    """
    wrapped, precision = context.wrapped, context.wrapped.precision
    low = precision.low_precision_model and not precision.master_weights
    undo = Transaction(chosen) if low else None
    wrapped.masters.end_comparison(chosen)
    with context.casting.update():
        for optimizer in chosen:
            with guard.within():
                optimizer.step()
    torch.clear_autocast_cache()
    if undo is not None:
        bad = non_finite(wrapped.names_of(held), [p.detach() for p in held])
        bad = bad or undo.non_finite_state(wrapped.names_of)
        if bad:
            undo.restore()
            return NonFinite(bad[0][0], bad[0][1], "weights")
    misfits = wrapped.masters.give_weights(held) if precision.master_weights else []
    if misfits:
        name = wrapped.names_of(misfits)[0]
        message = (
            f"weight {name!r} grew beyond {precision.format.upper()}'s range at step "
            f"{context.monitor.steps}: train it in FP32 (fp32_modules), lower the learning rate, or "
            "use BF16"
        )
        raise TrainingDiverged(message)
    return None


class StepGuard:
    """Warns once if a loop steps a trainer's optimizer itself, which nothing else would show.

    Args:
        optimizers: The trainer's.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._inside = self._said = False
        self._handles = [o.register_step_pre_hook(self._before) for o in optimizers]

    @contextmanager
    def within(self) -> Iterator[None]:
        """Steps inside this context are the trainer's own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def release(self) -> None:
        """Remove the hooks; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._inside or self._said:
            return
        self._said = True
        warnings.warn(
            "optimizer.step() was called past MixedPrecision: nothing was scaled, checked or logged; "
            "put mp.step(loss) in place of loss.backward() and optimizer.step()",
            RuntimeWarning,
            stacklevel=loop_stacklevel(),
        )


# -- closures --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of a closure, which has left gradients.

    Attributes:
        returned: What the optimizer is given.
        loss: The unscaled loss; None if it is not known.
        carried: The scale that is still on the gradients.
        known_bad: Whether gradients were seen earlier that were not finite.
    """

    returned: Any
    loss: float | None
    carried: float = 1.0
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
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not held:
            return evaluation.returned
        scale = scaling.scale
        judged = _judge(context, held, evaluation.carried, scale, clip, evaluation.known_bad)
        if not judged.finite:
            undo.restore()
            failed = FailedStep(held, scale, evaluation.loss, scaling.root, judged.bad_ranks)
            raise _EvaluationSkipped(skip_step(context, failed, judged.norm))
        scaling.note_unscaled(optimizer)
        taken.append((evaluation.loss, judged))
        return evaluation.returned

    returned: Any = None
    try:
        with context.casting.off():
            returned = step(closure)
    except _EvaluationSkipped as skip:
        return skip.result, None
    if not taken:
        return None, returned
    (loss, judged), scale = taken[0], scaling.scale
    if not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
        undo.restore()
        return skip_step(context, FailedStep([], scale, loss), math.nan), returned
    scaling.note_taken(max(j.absmax for _, j in taken), scale)
    return _taken(context, scale, loss, judged.norm), returned
