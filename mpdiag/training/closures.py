"""A step of an optimizer that evaluates the loss itself, several times (LBFGS)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mpdiag.errors import UsageError
from mpdiag.training import gradients, ranks
from mpdiag.training.arguments import parameters_of
from mpdiag.training.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from mpdiag.training.steps import StepResult
    from mpdiag.training.trainer import MixedPrecision


class _NotFinite(Exception):
    """Leaves an optimizer's step from inside a closure."""


def take_step(
    trainer: MixedPrecision,
    chosen: Sequence[Optimizer],
    closure: Callable[[], Tensor],
    clip_norm: float | None,
    clip_value: float | None,
) -> StepResult:
    """One step; an evaluation that is not finite undoes all of it.

    Raises:
        UsageError: If more than one optimizer would have to evaluate the closure.
    """
    if len(chosen) != 1:
        message = "step(closure=…) needs optimizer=…: name the one that evaluates it"
        raise UsageError(message)
    optimizer = chosen[0]
    wrapped, scale = trainer._wrapped, trainer.loss_scale
    undo = Transaction(chosen)
    seen: list[StepResult] = []

    def evaluate() -> float:
        # The optimizer has moved its masters; the model must see them.
        wrapped.masters.give_weights(parameters_of(optimizer))
        optimizer.zero_grad()
        loss = closure()
        trainer.backward(loss)
        factor = trainer._prepare(chosen)
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        found = [p.grad for p in held if p.grad is not None]
        sweep = gradients.sweep(found, wrapped.buffers.changed())
        norm, value = sweep.norm / factor, float(loss.detach())
        finite, bad = ranks.agree(sweep.finite, scale, trainer._device, trainer._group)
        if not finite:
            undo.restore()
            seen.append(trainer._skip(held, scale, value, norm, bad, None))
            raise _NotFinite
        gradients.unscale(found, factor)
        if clip_norm is not None:
            gradients.multiply(found, gradients.clip_factor(norm, clip_norm))
        if clip_value is not None:
            gradients.clamp(found, clip_value)
        trainer._unscaled.add(id(optimizer))
        seen.append(trainer._taken(scale, value, norm))
        return value

    try:
        with torch.autocast(trainer._device.type, enabled=False):
            optimizer.step(evaluate)
        if not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
            undo.restore()
            seen.append(trainer._skip([], scale, seen[0].loss, math.nan, [], None))
    except _NotFinite:
        pass
    wrapped.masters.give_weights(parameters_of(optimizer))
    if seen[-1].skipped:
        return seen[-1]
    trainer._scaler = trainer._scaler.adjust(0.0)
    return seen[0]
