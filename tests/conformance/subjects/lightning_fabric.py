"""Lightning Fabric with its ``MixedPrecision`` plugin, on a CPU."""

from __future__ import annotations

from typing import Any

from conformance.outcomes import NotApplicable
from conformance.subjects.prepared import PreparedTraining
from conformance.subjects.protocol import Scale, Subject
from conformance.subjects.torch_amp import Counter, grad_scaler
from torch import Tensor, nn
from torch.optim import Optimizer


class FabricTraining(PreparedTraining):
    """A loop as Fabric's documentation writes it."""

    def __init__(self, models: list, optimizers: list, scaler: Any, target: str) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins import MixedPrecision

        precision = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[target]
        self.plugin = MixedPrecision(precision, "cpu", scaler if target == "fp16" else None)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=self.plugin)
        if len(models) == 1:
            first, *steppers = self.fabric.setup(models[0], *optimizers)
            self.models, self.optimizers = [first], steppers
        else:
            self.models = [self.fabric.setup(model) for model in models]
            self.optimizers = [self.fabric.setup_optimizers(o) for o in optimizers]
        self.counters = {id(o): Counter(o.optimizer) for o in self.optimizers}

    @property
    def scale(self) -> float:
        if self.plugin.scaler is None:
            raise NotApplicable("BF16 has no scale")
        return self.plugin.scaler.get_scale()

    def autocast(self):
        return self.fabric.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.fabric.backward(loss, **options)

    def unscale(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers or self.optimizers:
            self.plugin.unscale_gradients(optimizer.optimizer)

    def clip(self, limit: float) -> float:
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit)
        return float(norm)

    def state(self) -> dict[str, Any]:
        return {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "precision": self.plugin.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.plugin.load_state_dict(state["precision"])

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        chosen = self.model if model is None else model
        inner = getattr(chosen, "module", chosen)
        return {n: p.detach().float().clone() for n, p in inner.named_parameters()}

    def close(self) -> None:
        for counter in self.counters.values():
            counter.handle.remove()


class Lightning(Subject):
    """``lightning.Fabric`` with ``precision="16-mixed"``."""

    name = "Lightning"
    package = "lightning"

    def begin(
        self, models: list[nn.Module], optimizers: list[Optimizer], scale: Scale, target: str
    ) -> FabricTraining:
        return FabricTraining(models, optimizers, grad_scaler(scale), target)
