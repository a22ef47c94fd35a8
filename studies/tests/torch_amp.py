"""``torch.autocast`` with ``torch.amp.GradScaler``, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from conformance.outcomes import NotApplicable
from conformance.subjects.protocol import Scale, Subject, Training
from torch import Tensor, nn
from torch.optim import Optimizer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def grad_scaler(scale: Scale) -> torch.amp.GradScaler:
    """torch's scaler with these settings."""
    if scale.least is not None or scale.most is not None:
        raise NotApplicable("the scale has no bounds to choose")
    if scale.hysteresis != 1:
        raise NotApplicable("no hysteresis")
    if scale.constant:
        raise NotApplicable("no constant scale that checks")
    return torch.amp.GradScaler(
        "cpu",
        init_scale=scale.init,
        growth_factor=scale.growth,
        backoff_factor=scale.backoff,
        growth_interval=scale.interval,
    )


class Counter:
    """Counts the steps that an optimizer takes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.taken = 0
        self.handle = optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.taken += 1


class AmpTraining(Training):
    """A loop as torch's documentation writes it."""

    def __init__(self, models: list, optimizers: list, scaler: Any, dtype: torch.dtype) -> None:
        self.models, self.optimizers = models, optimizers
        self.scaler, self.dtype = scaler, dtype
        self.counters = {id(o): Counter(o) for o in optimizers}

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def autocast(self):
        return torch.autocast("cpu", self.dtype)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.scaler.scale(loss).backward(**options)

    def unscale(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers or self.optimizers:
            self.scaler.unscale_(optimizer)

    def step(self, *optimizers: Optimizer) -> bool:
        chosen = optimizers or self.optimizers
        before = [self.counters[id(o)].taken for o in chosen]
        for optimizer in chosen:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in chosen:
            optimizer.zero_grad()
        return all(self.counters[id(o)].taken > n for o, n in zip(chosen, before, strict=True))

    def step_with(self, closure: Any) -> bool:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = closure()
            self.backward(loss)
            return loss

        self.scaler.step(self.optimizer, evaluate)
        self.scaler.update()
        return True

    def state(self) -> dict[str, Any]:
        return {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        for counter in self.counters.values():
            counter.handle.remove()


class TorchAmp(Subject):
    """``torch.autocast`` with ``GradScaler``."""

    name = "torch.amp"

    def begin(
        self, models: list[nn.Module], optimizers: list[Optimizer], scale: Scale, target: str
    ) -> AmpTraining:
        return AmpTraining(models, optimizers, grad_scaler(scale), DTYPES[target])
