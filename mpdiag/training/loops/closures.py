"""Steps of optimizers that evaluate their loss again and again, such as LBFGS."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.training.gradients.judgement import NO_CLIP, Clip, JudgedGradients
from mpdiag.training.gradients.scaling import parameters_of
from mpdiag.training.skips.diagnosis import FailedStep
from mpdiag.training.stepping import gradients_held, judge, skip_step, taken_step
from mpdiag.training.weights.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from mpdiag.training.results import StepResult
    from mpdiag.training.stepping import StepContext


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
        held, gradients = gradients_held(parameters_of(optimizer))
        if not held:
            return evaluation.returned
        scale = scaling.scale
        loss = evaluation.loss  # later ones may be infinite: a line search goes back from there
        bad = not taken and loss is not None and not math.isfinite(loss)
        judged = judge(
            context,
            gradients,
            carried=evaluation.carried,
            scale=scale,
            clip=clip,
            known_bad=evaluation.known_bad or bad,
        )
        if not judged.finite:
            undo.restore()
            failed = FailedStep(held, scale, loss, scaling.root, judged.bad_ranks)
            raise _EvaluationSkipped(skip_step(context, [optimizer], failed, judged))
        scaling.note_unscaled(optimizer)
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
    (loss, judged), scale = taken[0], scaling.scale
    if not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
        undo.restore()
        unknown = replace(judged, norm=math.nan)
        return skip_step(context, [optimizer], FailedStep([], scale, loss), unknown), returned
    scaling.note_taken([optimizer], max(j.absmax for _, j in taken), scale)
    return taken_step(context, scale, loss, judged.norm), returned
