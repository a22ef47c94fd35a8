"""The loss scale of a training, and which gradients carry it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.loss_scalers import Scaler
from mpdiag.training.judgement import any_nonzero


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer updates, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class GradientScaling:
    """Scales losses, and remembers at which scale each optimizer's gradients are.

    Attributes:
        losses: Those behind the gradients that wait, one a backward pass; None if one was no number.
        root: The ``grad_fn`` of the last loss, which holds the order of its backward pass.
        waits_for_update: Whether the scale changes in ``end_round`` alone.
        scaled_by_loop: Whether the loop was given a scaled loss: it runs the backward pass itself.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._round: _Round | None = None
        self.waits_for_update = self.scaled_by_loop = False
        self.losses: list[Tensor | float | None] = []
        self.root: Any = None
        self._carried: dict[int, float] = {}  # by id of the optimizer whose gradients wait
        self._unscaled: set[int] = set()
        self.penalized: set[int] = set()  # optimizers with regularisers in their gradients, by id

    @property
    def scaler(self) -> Scaler:
        """The loss scaler's state."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Scaler) -> None:
        self._scaler, self._round = scaler, None

    @property
    def scale(self) -> float:
        """The scale in force."""
        return self._scaler.scale

    @property
    def waiting(self) -> bool:
        """Whether gradients of a backward pass wait for their step."""
        return bool(self._carried)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in FP32: an FP16 loss could not hold the product.

        It is differentiated where gradients are off, too, as in a script's ``autograd.Function``.
        """
        factor = self._scaler.scale
        if factor == 1.0:
            return loss
        with torch.enable_grad():
            return loss.float() * factor

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
            self.losses = []
        self.losses.append(value)

    def note_values(self, values: Sequence[float]) -> None:
        """What the losses that are tensors hold, read from the device; nobody waits for it again.

        Where there are fewer values, the first losses are forgotten.
        """
        places = [i for i, value in enumerate(self.losses) if isinstance(value, Tensor)]
        kept = self.losses[places[-len(values)] :] if len(values) < len(places) else self.losses
        rest = iter(values)
        self.losses = [next(rest) if isinstance(value, Tensor) else value for value in kept]

    @property
    def loss(self) -> float | None:
        """The sum of the losses behind the gradients that wait; None if one was no single number."""
        known = [float(value) for value in self.losses if value is not None]
        return sum(known) if known and len(known) == len(self.losses) else None

    # -- by optimizer ------------------------------------------------------------------------------

    def begun_at(self, optimizer: Optimizer) -> float:
        """The scale of the backward passes behind an optimizer's gradients."""
        return self._carried.get(id(optimizer), self.scale)

    def refuse_unscaled(self, gradients: Sequence[Tensor]) -> None:
        """Refuse gradients of a loss that was not scaled.

        Raises:
            UsageError: If dividing them by the scale would change them.
        """
        if self.waiting or self.scaled_by_loop or self.scale == 1.0 or not any_nonzero(gradients):
            return
        raise UsageError(
            f"these gradients were not multiplied by the loss scale {self.scale:g}, and step() would "
            "divide them by it: call mp.step(loss), or mp.backward(loss) instead of loss.backward()"
        )

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether its gradients were unscaled ahead of their step."""
        return id(optimizer) in self._unscaled

    def note_unscaled(self, optimizer: Optimizer) -> None:
        """Its gradients carry no scale any more."""
        self._unscaled.add(id(optimizer))

    def align(self, optimizer: Optimizer) -> float:
        """Bring gradients that wait for their step to today's scale, so that sums stay right.

        Returns:
            By what the caller must multiply them.
        """
        key, scale = id(optimizer), self._scaler.scale
        before = self._carried.get(key, scale)
        if key in self._unscaled:
            before = 1.0
            self._unscaled.discard(key)
        self._carried[key] = scale
        return scale / before

    def forget(self, optimizers: Iterable[Optimizer]) -> None:
        """Their gradients were used, or thrown away."""
        for optimizer in optimizers:
            self._carried.pop(id(optimizer), None)
            self._unscaled.discard(id(optimizer))
            self.penalized.discard(id(optimizer))

    def forget_all(self) -> None:
        """No gradients wait any more."""
        self.losses = []
        self._carried.clear()
        self.penalized.clear()
        self._unscaled.clear()

    # -- after a step ------------------------------------------------------------------------------

    def note_taken(self, optimizers: Sequence[Optimizer], absmax: float, scale: float) -> None:
        """Adjust the scale after a step that was taken.

        Args:
            optimizers: What stepped.
            absmax: The largest unscaled |gradient| of the step, if the scaler needs it.
            scale: The step's scale.
        """
        seen = min(absmax, FP16.max / scale) if self._scaler.needs_absmax else 0.0
        self._note(optimizers, seen)

    def note_skipped(self, optimizers: Sequence[Optimizer]) -> None:
        """Adjust the scale after a step whose gradients were not finite."""
        self._note(optimizers, math.inf)

    def _note(self, optimizers: Sequence[Optimizer], absmax: float) -> None:
        """Let the scaler see the round's largest gradient so far.

        A round is a step of each optimizer: one that steps again begins the next. So the scale grows
        and falls once for all of them, as with one ``GradScaler.update`` in each iteration.
        """
        stepped = frozenset(map(id, optimizers))
        begun = self._round
        before, largest = self._scaler, max(0.0, absmax)
        if begun is not None and stepped and begun.stepped.isdisjoint(stepped):
            before, largest = begun.before, max(begun.absmax, absmax)
            stepped |= begun.stepped
        self._round = _Round(before, largest, stepped, before.adjust(largest))
        if not self.waits_for_update:
            self._scaler = self._round.after

    @property
    def next_scale(self) -> float:
        """The scale of the next step, as far as it is known."""
        return (self._scaler if self._round is None else self._round.after).scale

    def end_round(self) -> None:
        """Adjust the scale by the steps of this round; the next begins a new one."""
        if self._round is not None:
            self.scaler = self._round.after


class _Round(NamedTuple):
    """Steps that adjust the scale together.

    Attributes:
        before: The scaler as it was before the first of them.
        absmax: Their largest |gradient|; infinite where one was skipped.
        stepped: Their optimizers, by id.
        after: The scaler after them.
    """

    before: Scaler
    absmax: float
    stepped: frozenset[int]
    after: Scaler
