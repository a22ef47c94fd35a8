"""How a step is taken: the order that makes it safe.

::

    scale the loss (in FP32) → backward → gradients to the masters → unscale → regularisers →
    judge: finite on all ranks? → clip → optimizer step, or skip and restore →
    adjust the scale

Functions over a ``StepContext``, the parts that a trainer is made of. ``take_step`` and, in
``updates``, ``step_with_closure`` serve ``MixedPrecision`` and ``ScriptTrainer`` alike; what
differs between the two, how an optimizer is stepped and where gradients come from, is handed in.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.tracing.capture import refuse_capture
from mpdiag.training import arguments, judgement
from mpdiag.training.arguments import inside
from mpdiag.training.casting import Casting
from mpdiag.training.monitor import StepMonitor
from mpdiag.training.movement import AverageWatch, OptimizerWatch
from mpdiag.training.results import NonFinite, StepResult
from mpdiag.training.scaling import GradientScaling, parameters_of
from mpdiag.training.skips.diagnosis import FailedStep, diagnose
from mpdiag.training.weights.given import answers_late
from mpdiag.training.weights.masters import Masters
from mpdiag.training.weights.wrapping import Wrapped

Regularizer = Callable[[Mapping[str, Tensor]], Tensor]
Update = Callable[[Sequence[Tensor]], NonFinite | None]
"""Steps optimizers, given the parameters that have gradients; returns what did not fit its format."""


@dataclass(frozen=True, eq=False)
class StepContext:
    """The parts of a trainer.

    Attributes:
        wrapped: Models and optimizers, with the guard of their buffers.
        masters: FP32 copies of half-precision weights.
        casting: The arithmetic of forward passes, backward passes and updates.
        scaling: The loss scale, and which gradients carry it.
        monitor: Counts steps, writes them down, raises alarms.
        watch: Sees whether optimizers step the weights that they were given.
        averages: Sees whether weights that no optimizer holds are averages; None in FP32.
        ranks: Who must agree on a step, and the device of the models.
    """

    wrapped: Wrapped
    masters: Masters
    casting: Casting
    scaling: GradientScaling
    monitor: StepMonitor
    watch: OptimizerWatch
    averages: AverageWatch | None
    ranks: judgement.Ranks

    def chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        """The optimizers that are meant: one of the trainer's, or all.

        Raises:
            UsageError: If it is none of them.
        """
        held = self.wrapped.optimizers
        if optimizer is None:
            return held
        if not any(optimizer is o for o in held):
            raise UsageError(
                "optimizer= is not one that MixedPrecision was given: pass it to the constructor"
            )
        return [optimizer]

    def waiting_parameters(self) -> list[Tensor]:
        """The models' parameters while gradients of a backward pass wait for their step, else none."""
        if not self.scaling.waiting:
            return []
        held = (p for o in self.wrapped.optimizers for p in parameters_of(o))
        inside = (p for model in self.wrapped.models for p in model.parameters())
        return [*map(self.masters.model_parameter, held), *inside]

    def places(self, chosen: Sequence[Optimizer]) -> tuple[int, ...]:
        """Where some optimizers stand in the trainer's list."""
        held = self.wrapped.optimizers
        if chosen is held:
            return tuple(range(len(held)))
        return tuple(i for i, o in enumerate(held) if any(o is c for c in chosen))


# -- gradients before a step -----------------------------------------------------------------------


def note_loss(context: StepContext, loss: Tensor) -> None:
    """Make ready for the backward pass of a loss at today's scale.

    Raises:
        UsageError: If it is no tensor, or has no gradient.
    """
    arguments.check_loss(loss)
    refuse_capture()
    scaling, wrapped = context.scaling, context.wrapped
    wrapped.masters.begin_pass(adds=scaling.waiting)
    for optimizer in wrapped.optimizers:
        factor = scaling.align(optimizer)
        if factor != 1.0:
            judgement.multiply(_waiting_gradients(wrapped, optimizer), factor)
    scaling.note_loss(loss, adds=bool(scaling.losses) and gradients_wait(wrapped))


def gradients_matter(wrapped: Wrapped) -> bool:
    """Whether any of those that wait is not zero; waits for the device."""
    return any(judgement.any_nonzero(_waiting_gradients(wrapped, o)) for o in wrapped.optimizers)


def gradients_wait(wrapped: Wrapped) -> bool:
    """Whether any parameter of the optimizers has a gradient; on a CPU, zeros count as cleared."""
    return any(
        answers_late(gradient.device) or judgement.any_nonzero([gradient])
        for o in wrapped.optimizers
        for gradient in _waiting_gradients(wrapped, o)
    )


def _waiting_gradients(wrapped: Wrapped, optimizer: Optimizer) -> list[Tensor]:
    """Gradients of an optimizer's parameters, on the masters or still on the model."""
    earlier = wrapped.optimizers[: wrapped.optimizers.index(optimizer)]
    seen = {id(p) for o in earlier for p in parameters_of(o)}  # a parameter may be in several
    held = [p for p in parameters_of(optimizer) if id(p) not in seen]
    return [g for p in held for g in wrapped.masters.gradients_of(p)]


def gradients_held(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of some parameters that have gradients, and these."""
    held, gradients = [], []
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
            # Entries that stand for one value twice have no norm yet.
            p.grad = gradient = gradient.coalesce()
        elif type(gradient) is not Tensor:
            p.grad = gradient = judgement.without_partial_sums(gradient, p)
        held.append(p)
        gradients.append(gradient)
    return held, gradients


def _parameters_of_all(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """What some optimizers update, each once: a parameter may be in several."""
    found = [p for o in optimizers for p in parameters_of(o)]
    return found if len(set(map(id, found))) == len(found) else list(dict.fromkeys(found))


def unscale_gradients(context: StepContext, optimizer: Optimizer) -> None:
    """Divide an optimizer's gradients by their scale ahead of the step, to look at or to change."""
    refuse_capture()
    if not context.scaling.is_unscaled(optimizer):
        context.masters.collect_gradients([optimizer])
        _unscale(context, optimizer)
        context.masters.show_gradients(parameters_of(optimizer))


def _unscale(context: StepContext, optimizer: Optimizer) -> None:
    """Divide an optimizer's gradients by their scale, once.

    Raises:
        UsageError: If they never had it.
    """
    scaling = context.scaling
    if scaling.is_unscaled(optimizer):
        return
    held = parameters_of(optimizer)
    for other in context.wrapped.optimizers:  # a parameter may be in several
        if other is not optimizer and scaling.is_unscaled(other):
            done = {id(p) for p in parameters_of(other)}
            held = [p for p in held if id(p) not in done]
    gradients = gradients_held(held)[1]
    scaling.refuse_unscaled(gradients)
    judgement.unscale(gradients, scaling.begun_at(optimizer))
    scaling.note_unscaled(optimizer)


def prepare_gradients(
    context: StepContext, chosen: Sequence[Optimizer], regularizers: Sequence[Regularizer]
) -> None:
    """Leave unscaled gradients where the optimizers look for them, with those of regularisers."""
    context.masters.begin_update(chosen)
    for optimizer in chosen:
        _unscale(context, optimizer)
    if regularizers and not context.scaling.penalized.issuperset(map(id, chosen)):
        context.scaling.penalized.update(map(id, chosen))  # a step that raises may be called again
        _add_penalties(context, _parameters_of_all(chosen), regularizers)


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
    clip: judgement.Clip = judgement.NO_CLIP,
    known_bad: bool = False,
    replay: Callable[[], Tensor] | None = None,
    losses_decide: bool = True,
) -> StepResult:
    """Judge the gradients, then update weights or skip.

    Args:
        context: The trainer's parts.
        chosen: The optimizers to step, together; unscaled gradients are where they look for them.
        update: Steps them.
        clip: Limits on the gradients.
        known_bad: Whether gradients were seen earlier that were not finite.
        replay: Returns the loss of the same batch once more, to find the cause of a skip.
        losses_decide: Whether an infinite loss alone skips the step; see ``ForwardPass``.

    Raises:
        UsageError: If there is no gradient, or ranks disagree on the scale.
        TrainingDiverged: If a weight left the format.
    """
    refuse_capture()
    scaling = context.scaling
    scale = scaling.begun_at(chosen[0])
    held, gradients = gradients_held(_parameters_of_all(chosen))
    judged = judge(
        context,
        held,
        gradients,
        [loss for loss in scaling.losses if isinstance(loss, Tensor)],
        scale=scale,
        clip=clip,
        known_bad=known_bad,
        inspect=context.monitor.inspect,
        losses_decide=losses_decide,
    )
    step, misfits = context.masters.device_answered(chosen)
    stop_at_misfits(context.wrapped, misfits, step)
    loss = scaling.loss
    if not judged.finite:
        failed = FailedStep(held, scale, loss, scaling.root, judged.bad_ranks)
        return skip_step(context, chosen, failed, judged, replay)
    misfit = update(held)
    if misfit is not None:
        return skip_step(context, chosen, FailedStep(held, scale, loss, misfit=misfit), judged)
    scaling.note_taken(chosen, judged.absmax, scale)
    if loss is not None and not math.isfinite(loss):
        loss = None  # it holds that of another model, which this step did not train on
    return taken_step(context, scale, loss, judged.norm)


def stop_at_misfits(wrapped: Wrapped, misfits: Sequence[Tensor], step: int) -> None:
    """End the training if masters do not fit the model's format."""
    if misfits:
        name = wrapped.names_of(misfits)[0]
        raise TrainingDiverged(
            f"weight {name!r} grew beyond {wrapped.precision.format.upper()}'s range at step {step}: "
            "train it in FP32 (fp32_modules), lower the learning rate, or use BF16"
        )


def judge(
    context: StepContext,
    held: Sequence[Tensor],
    gradients: Sequence[Tensor],
    losses: Sequence[Tensor] = (),
    *,
    scale: float,
    clip: judgement.Clip,
    known_bad: bool,
    inspect: Callable[[Sequence[Tensor]], None] | None = None,
    losses_decide: bool = True,
) -> judgement.JudgedGradients:
    """Judge gradients of what is held, their losses and the buffers; see ``judge_gradients``."""
    buffers, note_values = context.wrapped.buffers, context.scaling.note_values
    return judgement.judge_gradients(
        gradients,
        judgement.ForwardPass(losses, buffers.sizes(), buffers.spoiled, note_values, losses_decide),
        scale=scale,
        ranks=context.ranks,
        parameters=held,
        absmax=context.scaling.scaler.needs_absmax,
        known_bad=known_bad,
        clip=clip,
        inspect=inspect,
    )


def taken_step(context: StepContext, scale: float, loss: float | None, norm: float) -> StepResult:
    """The result of a step that was taken."""
    return StepResult(
        skipped=False,
        reason="",
        step=context.monitor.steps,
        scale=scale,
        next_scale=context.scaling.next_scale,
        loss=loss,
        gradient_norm=norm,
        rank=judgement.rank(),
    )


def skip_step(
    context: StepContext,
    chosen: Sequence[Optimizer],
    failed: FailedStep,
    judged: judgement.JudgedGradients,
    replay: Callable[[], Tensor] | None = None,
) -> StepResult:
    """Restore buffers, find the cause and adjust the scale.

    One skip alone is how a dynamic scale finds its value: the operation at fault is looked for from
    the second skip in a row on.
    """
    monitor = context.monitor
    again = monitor.skips.in_a_row_of(context.places(chosen)) > 0
    with monitor.share.paused():
        diagnosis = diagnose(context.wrapped, context.casting, failed, replay, locate=again)
    context.scaling.note_skipped(chosen)
    return StepResult(
        skipped=True,
        reason=diagnosis.reason,
        operation=diagnosis.operation,
        step=monitor.steps,
        scale=failed.scale,
        next_scale=context.scaling.next_scale,
        loss=failed.loss,
        gradient_norm=judged.norm,
        non_finite=diagnosis.found,
        cause=diagnosis.cause,
        rank=judgement.rank(),
        at_any_scale=judged.forward_failed or failed.misfit is not None,
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
    context.wrapped.start.ended()
    context.masters.remember(chosen)
    context.scaling.root = None
    if result.skipped:
        for optimizer in (one for o in chosen for one in inside(o)):
            # A scheduler stepped after a skip must not complain of the order.
            optimizer._opt_called = True  # type: ignore[attr-defined]
    context.scaling.losses = []
    if context.averages is not None and context.wrapped.optimizers[0] in chosen:
        context.averages.step_ended()
    context.monitor.note_step(
        result,
        context.scaling.scaler.floor,
        stepped=context.places(chosen),
        shares_step=shares_step,
    )
