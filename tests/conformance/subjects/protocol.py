"""What every subject offers: a training loop in the words that all of them share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Scale:
    """A dynamic loss scale, as ``torch.amp.GradScaler`` names its settings.

    Attributes:
        init, growth, backoff, interval: The settings of ``GradScaler``.
        hysteresis: Overflows before the scale falls; 1: the first.
        consecutive: Whether every finite step refills the hysteresis.
        least, most: Bounds; None: the subject's own.
        constant: The scale never changes.
    """

    init: float = 1024.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    consecutive: bool = False
    least: float | None = None
    most: float | None = None
    constant: bool = False


class Training:
    """A training under way. A subject's own has these, too:

    ``autocast()``: a context for forward passes and losses;
    ``backward(loss, **options)``: scale a loss and run its backward pass;
    ``unscale(*optimizers)``: divide the gradients by the scale, of all optimizers by default;
    ``step(*optimizers)``: step, adjust the scale and clear the gradients; whether all steps were taken;
    ``step_with(closure)``: step the first optimizer with a closure that returns the unscaled loss;
    ``state()``, ``load(state)``: what a checkpoint holds, and to go on from it;
    ``close()``: undo what the subject has done to models and optimizers.

    Attributes:
        models, optimizers: As the loop holds them, wrapped where the subject wraps.
        raw: The first model as it was made.
        scale: The loss scale in force.
    """

    models: Sequence[nn.Module]
    raw: Any
    optimizers: Sequence[Optimizer]

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def clip(self, limit: float) -> float:
        """Unscale and clip the norm of the first optimizer's gradients; returns the norm."""
        self.unscale(self.optimizer)
        return float(nn.utils.clip_grad_norm_(self.stepped(), limit))

    def stepped(self) -> list[Tensor]:
        """What the first optimizer steps: parameters, or their masters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A model's parameters in full precision, in FP32 and detached."""
        chosen = self.model if model is None else model
        return {n: p.detach().float().clone() for n, p in chosen.named_parameters()}

    # -- what loops do with these --------------------------------------------------------------

    def forward(self, *inputs: Tensor, model: nn.Module | None = None) -> Tensor:
        """A model's output in FP32; inputs are FP32, too."""
        with self.autocast():
            output: Tensor = (self.model if model is None else model)(*inputs)
        return output.float()

    def train(self, *inputs: Tensor) -> bool:
        """One step on the sum of the outputs."""
        self.backward(self.forward(*inputs).sum())
        return self.step()


class Subject:
    """A trainer that behaviours are asked of.

    Its own ``begin(models, optimizers, scale, target)`` begins a training of FP32 models.

    Attributes:
        name: What the table calls it.
        level: Ours: its level.
        label: Ours: its level, and how it is driven.
        drop_in: Ours: whether it is driven by ``mp.scaler()``.
        ours: Whether it is this project's.
        casts_operations: Whether operations are cast one by one.
        low_model: Whether the model itself holds half-precision weights.
        package: What has to be installed, and whose version the table names.
    """

    name: str
    level: str = ""
    label: str = ""
    drop_in: bool = False
    ours: bool = False
    casts_operations: bool = True
    low_model: bool = False
    package: str = "torch"

    def __repr__(self) -> str:
        return f"{self.name} {self.label}".strip()

    @contextmanager
    def training(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        scale: Scale | None = None,
        *,
        target: str = "fp16",
        rate: float = 0.5,
    ) -> Iterator[Training]:
        """A training of one or several models; by default with plain SGD on each."""
        several = [models] if isinstance(models, nn.Module) else list(models)
        if optimizers is None:
            optimizers = [torch.optim.SGD(m.parameters(), rate) for m in several]
        steppers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        training = self.begin(several, steppers, scale or Scale(), target)
        training.raw = several[0]
        try:
            yield training
        finally:
            training.close()
