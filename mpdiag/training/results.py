"""The result of a step: taken, or skipped with a reason."""

from dataclasses import dataclass
from typing import Literal

from mpdiag.tracing.nonfinite import Producer

SkipCause = Literal["scale", "format", "model", "unknown"]
NonFiniteKind = Literal["Inf", "NaN"]


@dataclass(frozen=True)
class NonFinite:
    """Something that was not finite.

    Attributes:
        name: Parameter, buffer or module, as PyTorch names it.
        kind: ``Inf`` or ``NaN``.
        where: ``forward`` (the loss or an output), ``backward`` (a gradient), ``weights``,
            ``buffers``, or ``other rank``.
    """

    name: str
    kind: NonFiniteKind
    where: Literal["forward", "backward", "weights", "buffers", "other rank"]

    def __str__(self) -> str:
        """What was not finite, and where."""
        what = {
            "forward": "in the forward pass: {0}",
            "backward": "in the gradient of {0}",
            "weights": "in weight {0}",
            "buffers": "in buffer {0}",
            "other rank": "on {0}",
        }[self.where]
        return f"{self.kind} {what.format(self.name)}"


@dataclass(frozen=True)
class StepResult:
    """The result of one call of ``MixedPrecision.step``.

    Attributes:
        skipped: Whether the step was skipped: weights, optimizer state and buffers are unchanged.
        reason: Why the step was skipped, as a sentence; "" if it was taken.
        step: Number of the step, from 0.
        scale: Loss scale of this step.
        next_scale: Loss scale of the next step.
        loss: The sum of the unscaled losses of the step's backward passes. None if a loss was not a
            single number. With a closure, the loss of its first evaluation.
        gradient_norm: L2 norm of all unscaled gradients before clipping. Infinite or NaN if the step
            was skipped.
        non_finite: Tensors with an infinity or a NaN, in the order of the backward pass.
        cause: ``scale``: a smaller loss scale would have been finite. ``format``: only FP32 would
            have been finite. ``model``: FP32 is not finite either. ``unknown``: not tested.
        rank: The rank of this process.
        operation: The first operation that produced an infinity or a NaN, with its module, line and
            inputs. Set from the second skip in a row on, if ``replay`` was given.
        at_any_scale: Whether no loss scale would help: on some rank the loss or a buffer was not
            finite, or an update did not fit the weights' format.
    """

    skipped: bool
    reason: str
    step: int
    scale: float
    next_scale: float
    loss: float | None
    gradient_norm: float
    non_finite: tuple[NonFinite, ...] = ()
    cause: SkipCause | None = None
    rank: int = 0
    operation: Producer | None = None
    at_any_scale: bool = False

    @property
    def first(self) -> NonFinite | None:
        """The first tensor with an infinity or a NaN; None if there is none."""
        return self.non_finite[0] if self.non_finite else None
