"""The loss scale of a training, and which gradients carry it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpdiag.numerics.formats import FP16
from mpdiag.training.gradients.judgement import multiply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from mpdiag.numerics.loss_scalers import Scaler


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer updates, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class GradientScaling:
    """Scales losses, and remembers at which scale each optimizer's gradients are.

    Attributes:
        scaler: The loss scaler's state.
        root: The ``grad_fn`` of the last loss, which holds the order of its backward pass.
    """

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler
        self._losses: list[Tensor | float | None] = []  # of the backward passes since the last step
        self.root: Any = None
        self._carried: dict[int, float] = {}  # by id of the optimizer whose gradients wait
        self._unscaled: set[int] = set()

    @property
    def scale(self) -> float:
        """The scale in force."""
        return self.scaler.scale

    @property
    def waiting(self) -> bool:
        """Whether gradients of a backward pass wait for their step."""
        return bool(self._carried)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in FP32: an FP16 loss could not hold the product."""
        factor = self.scale
        return loss if factor == 1.0 else loss.float() * factor

    def note_loss(self, loss: Tensor, *, adds: bool = False) -> None:
        """Remember a loss whose backward pass is about to run; for ``adds`` see ``add_loss``."""
        if loss.grad_fn is not None:
            self.root = loss.grad_fn
        self.add_loss(loss.detach() if loss.numel() == 1 else None, adds=adds)

    def add_loss(self, value: Tensor | float | None, *, adds: bool) -> None:
        """Remember the unscaled value that a backward pass differentiates.

        Args:
            value: One number; None if it was none.
            adds: Whether the gradients of earlier passes are there, so that this one adds to them.
        """
        if not adds:
            self._losses = []
        self._losses.append(value)

    @property
    def loss(self) -> float | None:
        """The sum of the losses behind the gradients that wait; None if one was no single number."""
        known = [float(value) for value in self._losses if value is not None]
        return sum(known) if known and len(known) == len(self._losses) else None

    def take_loss(self) -> float | None:
        """The same; it is then forgotten."""
        loss, self._losses = self.loss, []
        return loss

    # -- by optimizer ------------------------------------------------------------------------------

    def begun_at(self, optimizer: Optimizer) -> float:
        """The scale of the backward passes behind an optimizer's gradients."""
        return self._carried.get(id(optimizer), self.scale)

    def carried(self, optimizer: Optimizer) -> float:
        """The scale that is still on an optimizer's gradients."""
        return 1.0 if id(optimizer) in self._unscaled else self.begun_at(optimizer)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether its gradients were unscaled ahead of their step."""
        return id(optimizer) in self._unscaled

    def note_unscaled(self, optimizer: Optimizer) -> None:
        """Its gradients carry no scale any more."""
        self._unscaled.add(id(optimizer))

    def align(self, optimizer: Optimizer, gradients_of: Callable[[], Sequence[Tensor]]) -> None:
        """Bring gradients that wait for their step to today's scale, so that sums stay right."""
        key, scale = id(optimizer), self.scale
        before = self._carried.get(key, scale)
        if key in self._unscaled:
            before = 1.0
            self._unscaled.discard(key)
        if before != scale:
            multiply(gradients_of(), scale / before)
        self._carried[key] = scale

    def forget(self, optimizers: Iterable[Optimizer]) -> None:
        """Their gradients were used, or thrown away."""
        for optimizer in optimizers:
            self._carried.pop(id(optimizer), None)
            self._unscaled.discard(id(optimizer))

    def forget_all(self) -> None:
        """No gradients wait any more."""
        self._losses = []
        self._carried.clear()
        self._unscaled.clear()

    # -- after a step ------------------------------------------------------------------------------

    def note_taken(self, absmax: float, scale: float) -> None:
        """Adjust the scale after a step that was taken.

        Args:
            absmax: The largest unscaled |gradient| of the step, if the scaler needs it.
            scale: The step's scale.
        """
        seen = min(absmax, FP16.max / scale) if self.scaler.needs_absmax else 0.0
        self.scaler = self.scaler.adjust(seen)

    def note_skipped(self) -> None:
        """Adjust the scale after a step whose gradients were not finite."""
        self.scaler = self.scaler.adjust(math.inf)
