"""An exhibit: a model that returns its own loss, its batches, and how to train it.

The loss is computed inside the model, in a module of its own, so that every operation that rounds
belongs to a named module. The metric of all exhibits is the loss on held-out data after training,
computed in FP32.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from mpdiag.training.trainer import MixedPrecision

Batch = tuple[Tensor, ...]
HELD_OUT = 1_000_003
"""Seed of the held-out data."""
EVALUATION_BATCHES = 4


@dataclass(frozen=True)
class Exhibit:
    """A small training.

    Attributes:
        name: The name that ``load`` takes.
        title: A short description.
        model: A fresh model, whose call on a batch returns the loss.
        data: The next batch from a generator.
        rate: Learning rate of Adam, or of SGD with momentum.
        steps: Optimizer steps.
        sgd: Whether SGD trains it.
        held_back: Not used while developing rules, so that it can check them.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    rate: float = 3e-3
    steps: int = 80
    sgd: bool = False
    held_back: bool = False

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer that trains this exhibit."""
        if self.sgd:
            return torch.optim.SGD(model.parameters(), self.rate, momentum=0.9)
        return torch.optim.Adam(model.parameters(), self.rate)

    def batches(self, seed: int) -> list[Batch]:
        """The batches of a training, in order."""
        generator = torch.Generator().manual_seed(seed)
        return [self.data(generator) for _ in range(self.steps)]

    def build(self, seed: int) -> tuple[nn.Module, Optimizer, Callable[[MixedPrecision], float]]:
        """A fresh training, for ``search_fp32``."""
        torch.manual_seed(seed)
        model = self.model()
        optimizer = self.optimizer(model)

        def train(mp: MixedPrecision) -> float:
            for batch in self.batches(seed):
                with mp.autocast():
                    loss = model(*batch)
                mp.step(loss, clip_norm=5.0)
            return self.evaluate(mp.fp32_state_dict(model))

        return model, optimizer, train

    def evaluate(self, state: dict[str, Tensor]) -> float:
        """The held-out loss of weights, in FP32."""
        with torch.random.fork_rng(devices=()):
            model = self.model()
            model.load_state_dict(state)
            model.eval()
            generator = torch.Generator().manual_seed(HELD_OUT)
            with torch.no_grad():
                torch.manual_seed(HELD_OUT)
                losses = [model(*self.data(generator)) for _ in range(EVALUATION_BATCHES)]
        return float(torch.stack(losses).mean())


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b)] if i == 0 else [nn.ReLU(), nn.Linear(a, b)]
    return nn.Sequential(*layers)


class Chain(nn.Module):
    """A body, and a criterion on its output and the targets."""

    def __init__(self, body: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.criterion = criterion

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        loss: Tensor = self.criterion(self.body(x), y)
        return loss


def digits(generator: torch.Generator, size: int = 32) -> Batch:
    """Images [B, 64] from 0 to 1 and labels [B] of scikit-learn's digits."""
    from mpdiag.workloads.digits import digit_images

    images, labels = digit_images("test" if generator.initial_seed() == HELD_OUT else "train")
    rows = torch.randint(0, len(labels), (size,), generator=generator)
    return images[rows].flatten(1), labels[rows]


def digit_maps(generator: torch.Generator) -> Batch:
    """Images [B, 1, 8, 8] and labels [B]."""
    x, y = digits(generator)
    return x.view(-1, 1, 8, 8), y


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal values of a shape."""
    return torch.randn(*shape, generator=generator)


_TEACHER = torch.randn(16, 8, generator=torch.Generator().manual_seed(7)) / 4


def teach(x: Tensor) -> Tensor:
    """A smooth function of the first 16 features, [B, 8], about unit size."""
    return torch.sin(x[:, :16] @ _TEACHER * 2)
