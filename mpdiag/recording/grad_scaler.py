"""Recording a training that already uses ``torch.amp.GradScaler``.

Its gradients arrive multiplied by a scale, and where it finds an overflow it never calls the
optimizer, so no optimizer hook fires. GradScaler has no hooks; its ``step`` is wrapped on the
*instance*, never on the class.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.recording.ledger import Ledger
from mpdiag.recording.step_clock import Step, StepClock, StepListener


class ScalerWatch(StepListener):
    """Finds live GradScalers, wraps their ``step``, and knows the scale of the present step.

    Args:
        clock: Told when a scaler skips an optimizer's step.
        ledger: Told which weight gradients carry a scale.
        optimizers: The optimizers watched; scalers stepping others are left alone.

    Attributes:
        scale: The scale that gradients of the present step carry; a number or a tensor.
        skipped: Whether the scaler skipped the step; likewise.
    """

    def __init__(self, clock: StepClock, ledger: Ledger, optimizers: Sequence[Optimizer]) -> None:
        self.scale: Any = 1.0
        self.skipped: Any = False
        self._clock = clock
        self._ledger = ledger
        self._optimizers = {id(o) for o in optimizers}
        self._searched = False
        self._stepped: set[int] = set()
        self._wrapped: list[Any] = []

    def find(self) -> None:
        """Look for scalers among all live objects; that takes 15 to 100 ms, once for new optimizers."""
        kinds = _with_subclasses(torch.amp.GradScaler)
        known = {id(scaler) for scaler in self._wrapped}
        # An object refers to its class, and asking who does is 2.5 times as fast as looking at all.
        for candidate in gc.get_referrers(*kinds):
            # ``type`` and not ``isinstance``, which would wake lazy proxies.
            if type(candidate) in kinds and id(candidate) not in known and candidate.is_enabled():
                self._wrap(candidate)

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch scalers that step these optimizers, too."""
        self._optimizers.update(id(o) for o in optimizers)
        self._searched = False

    def step_began(self, _step: Step) -> None:
        """No scale is known yet."""
        self.scale, self.skipped = 1.0, False

    def backward_reached(self) -> None:
        """By now a scaler of this loop exists, and its ``step`` is still to come."""
        if not self._searched and self._optimizers:
            self._searched = True
            self.find()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """A fused optimizer unscales inside its ``step``, and skips there, too."""
        self._stepped.add(id(optimizer))
        if getattr(optimizer, "grad_scale", None) is None or not self._clock.recording:
            return
        self._ledger.set_scale("weight_grad", self.scale)
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self.skipped = found.detach().clone()

    def stopped(self) -> None:
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
            if scale is not None:
                self.scale = scale.detach().clone()
            result = original(optimizer, *args, **kwargs)
            if id(optimizer) not in self._stepped:
                self.skipped = True
                self._clock.optimizer_stepped(optimizer)
            return result

        scaler.step = step
        self._wrapped.append(scaler)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))
