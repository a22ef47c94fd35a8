"""Recording a training that already uses ``torch.amp.GradScaler``.

Its gradients arrive multiplied by a scale, and a step with an overflow never reaches the optimizer,
so no optimizer hook tells of it. GradScaler has no hooks; its ``step`` is wrapped on the *instance*,
never on the class.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer


class ScaledSteps(Protocol):
    """What a watched scaler tells the recorder."""

    def scaled_step_began(self, scale: torch.Tensor | None) -> None:
        """``scaler.step`` was called; the gradients of this step carry ``scale``."""

    def scaled_step_skipped(self, optimizer: Optimizer) -> None:
        """``scaler.step`` returned without calling the optimizer."""


class ScalerWatch:
    """Finds live GradScalers and wraps their ``step``.

    Args:
        steps: Who is told.
        optimizers: The optimizers watched; scalers stepping others are left alone.
    """

    def __init__(self, steps: ScaledSteps, optimizers: list[Optimizer]) -> None:
        self._steps = steps
        self._optimizers = {id(o) for o in optimizers}
        self._stepped: set[int] = set()
        self._wrapped: list[Any] = []

    def find(self) -> None:
        """Look for scalers among all live objects; some tens of milliseconds, so not every step."""
        known = {id(scaler) for scaler in self._wrapped}
        for candidate in gc.get_objects():
            # ``type`` and not ``isinstance``, which would wake lazy proxies.
            new = issubclass(type(candidate), torch.amp.GradScaler) and id(candidate) not in known
            if new and candidate.is_enabled():
                self._wrap(candidate)

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch scalers that step these optimizers, too."""
        self._optimizers.update(id(o) for o in optimizers)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer's own hook fired."""
        self._stepped.add(id(optimizer))

    def release(self) -> None:
        """Put every scaler back as it was."""
        for scaler in self._wrapped:
            scaler.__dict__.pop("step", None)
        self._wrapped = []

    def _wrap(self, scaler: Any) -> None:
        original: Callable[..., Any] = scaler.step

        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if id(optimizer) not in self._optimizers:
                return original(optimizer, *args, **kwargs)
            self._stepped.discard(id(optimizer))
            scale = getattr(scaler, "_scale", None)
            self._steps.scaled_step_began(None if scale is None else scale.detach().clone())
            result = original(optimizer, *args, **kwargs)
            if id(optimizer) not in self._stepped:
                self._steps.scaled_step_skipped(optimizer)
            return result

        scaler.step = step
        self._wrapped.append(scaler)
