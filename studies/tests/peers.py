"""Other people's trainers, as the conformance table asks them: Accelerate, Lightning Fabric, on a CPU.

On a CPU Accelerate's ``mixed_precision="fp16"`` has no effect; so it is handed the scaler that it makes
for itself on a GPU, and its own code does the rest.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from conformance.outcomes import NotApplicable
from conformance.subjects.protocol import Scale, Subject, Training
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_amp import Counter, TorchAmp, grad_scaler

VERSIONS = {"torch": "2.13", "accelerate": "1.15", "lightning": "2.6"}
"""With which the table was made: peers are only held to it where these are installed."""


def installed(subject: Subject) -> str:
    """The version of a peer, as far as it counts; empty if it is not installed."""
    try:
        return ".".join(version(subject.package).split("+")[0].split(".")[:2])
    except ModuleNotFoundError:
        return ""


class PreparedTraining(Training):
    """A loop that calls ``step`` and ``zero_grad`` of optimizers that a library has prepared.

    Attributes:
        counters: By id of the prepared optimizer, what counts the steps of the one inside.
    """

    counters: dict[int, Counter]

    def step(self, *optimizers: Optimizer) -> bool:
        chosen = optimizers or self.optimizers
        before = [self.counters[id(o)].taken for o in chosen]
        for optimizer in chosen:
            optimizer.step()
        for optimizer in chosen:
            optimizer.zero_grad()
        return all(self.counters[id(o)].taken > n for o, n in zip(chosen, before, strict=True))

    def step_with(self, closure: Any) -> bool:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = closure()
            self.backward(loss)
            return loss

        self.optimizer.step(evaluate)
        return True


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


PEERS = (TorchAmp(), Accelerate(), Lightning())
