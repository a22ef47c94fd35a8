"""What several families of cases use: random numbers, small models, supervised training."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from cases.case import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def generator(seed: int, step: int = 0) -> torch.Generator:
    """Random numbers that depend on the seed and the step alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step * 7919 + 17)


TEST = 12345
"""The seed of every test set."""


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [activation()] if i else []
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def small_output(model: nn.Sequential) -> nn.Sequential:
    """A tenth of the usual weights in the last layer, and no bias: the first outputs are near 0."""
    last = model[-1]
    with torch.no_grad():
        last.weight.mul_(0.1)
        last.bias.zero_()
    return model


def supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Any, Tensor]],
    criterion: Callable[[Tensor, Tensor], Tensor],
    test: tuple[Any, Tensor],
    score: Callable[[Tensor, Tensor], float],
    **options: Any,
) -> Training:
    """A training on batches (inputs, targets), scored on a test set."""

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return criterion(model(x), y)

    def evaluate() -> float:
        model.eval()
        return score(model(test[0]), test[1])

    return Training(model, optimizer, loss, evaluate, **options)


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(-1) == y).float().mean())


def rmse(output: Tensor, y: Tensor) -> float:
    return float(F.mse_loss(output, y).sqrt())


def relative_rmse(output: Tensor, y: Tensor) -> float:
    """Root of the mean square error as a share of the targets' standard deviation."""
    return float((F.mse_loss(output, y) / y.var()).sqrt())


def cosine(
    optimizer: torch.optim.Optimizer, steps: int, final: float = 0.0
) -> Callable[[int], None]:
    """A schedule: from the present rates by half a cosine to a share of them."""
    first = [g["lr"] for g in optimizer.param_groups]

    def schedule(step: int) -> None:
        wave = 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * step / steps)))
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * (final + (1 - final) * wave)

    return schedule


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Handwritten digits of 8 × 8 pixels, 0 to 1: training images, classes, test images, classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(y), generator=generator(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def digit_batch(seed: int, step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    x, y, _, _ = digits()
    chosen = torch.randint(0, len(y), (size,), generator=generator(seed, step))
    return x[chosen], y[chosen]
