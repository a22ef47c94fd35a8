"""Hugging Face Accelerate, on a CPU.

There ``mixed_precision="fp16"`` has no effect; so Accelerate is handed the scaler that it makes for
itself on a GPU, and its own code does the rest.
"""

from __future__ import annotations

from typing import Any

from conformance.outcomes import NotApplicable
from conformance.subjects.prepared import PreparedTraining
from conformance.subjects.protocol import Scale, Subject
from conformance.subjects.torch_amp import Counter, grad_scaler
from torch import Tensor, nn
from torch.optim import Optimizer


class AccelerateTraining(PreparedTraining):
    """A loop as Accelerate's documentation writes it."""

    def __init__(self, models: list, optimizers: list, scaler: Any, target: str) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision=target)
        if target == "fp16":
            self.accelerator.native_amp = True
            self.accelerator.scaler = scaler
        prepared = self.accelerator.prepare(*models, *optimizers)
        if len(models) + len(optimizers) == 1:
            prepared = (prepared,)
        self.models = list(prepared[: len(models)])
        self.optimizers = list(prepared[len(models) :])
        self.counters = {id(o): Counter(o.optimizer) for o in self.optimizers}

    @property
    def scale(self) -> float:
        if self.accelerator.scaler is None:
            raise NotApplicable("BF16 has no scale")
        return self.accelerator.scaler.get_scale()

    def autocast(self):
        return self.accelerator.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.accelerator.backward(loss, **options)

    def unscale(self, *optimizers: Optimizer) -> None:
        self.accelerator.unscale_gradients(list(optimizers) or None)

    def clip(self, limit: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))

    def state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        from accelerate.state import AcceleratorState

        for counter in self.counters.values():
            counter.handle.remove()
        AcceleratorState._reset_state(reset_partial_state=True)


class Accelerate(Subject):
    """``accelerate.Accelerator``."""

    name = "Accelerate"
    package = "accelerate"

    def begin(
        self, models: list[nn.Module], optimizers: list[Optimizer], scale: Scale, target: str
    ) -> AccelerateTraining:
        return AccelerateTraining(models, optimizers, grad_scaler(scale), target)
