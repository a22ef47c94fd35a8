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
        skipped: Whether weights, optimizer state and buffers stayed as they were.
        reason: Why it was skipped, in a sentence; empty if it was taken.
        step: Calls of ``step`` before this one.
        scale: Loss scale of this step's gradients.
        next_scale: Loss scale of the next step's.
        loss: The sum of the unscaled losses of its backward passes; None if one was no single
            number. Of a closure, that of its first evaluation.
        gradient_norm: Euclidean norm of all unscaled gradients before clipping; infinite or NaN on
            a skip.
        non_finite: What was not finite, in the order in which the backward pass meets it.
        cause: ``scale``: a smaller loss scale would have been finite; ``format``: no scale would,
            FP32 would; ``model``: FP32 is not finite either; ``unknown``: not tried.
        rank: The process that saw it.
        operation: After a second skip in a row, and with ``replay``: the first operation that
            produced an infinity or a NaN, with its module, its line and what it was given.
        at_any_scale: Whether the loss or a buffer was not finite, on any rank, or an update did not
            fit the weights' format: no loss scale changes these.
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
        """What went non-finite first."""
        return self.non_finite[0] if self.non_finite else None
