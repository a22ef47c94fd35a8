"""Random numbers, small networks and measures that several families of cases use."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Training

if TYPE_CHECKING:
    from collections.abc import Callable

TEST = 900_001
"""The seed of every test set."""


def rng(seed: int, step: int = 0) -> torch.Generator:
    """Random numbers of a seed and a step."""
    return torch.Generator().manual_seed(7_368_787 * (seed + 3) + 15_485_863 * (step + 1))


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    sample: Callable[[int, torch.Generator], tuple[Any, Any]],
    criterion: Callable[[Any, Any], Tensor],
    measure: Callable[[Any, Any], float],
    batch: int = 64,
    test: int = 1000,
    **options: Any,
) -> Training:
    """A training on fresh samples of a seed, measured on samples that are the same for all."""
    x_test, y_test = sample(test, rng(TEST))

    def loss(step: int) -> Tensor:
        x, y = sample(batch, rng(seed, step))
        return criterion(model(x), y)

    def evaluate() -> float:
        model.eval()
        return measure(model(x_test), y_test)

    return Training(model, optimizer, loss, evaluate, **options)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` by sums, for the making of data.

    Args:
        x: (..., k).
        matrix: (k, m).
    """
    return (x.unsqueeze(-1) * matrix).sum(-2)


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(-1) == y).float().mean())


def binary_accuracy(logits: Tensor, y: Tensor) -> float:
    return float(((logits > 0) == (y > 0.5)).float().mean())


def nll(logits: Tensor, y: Tensor) -> float:
    return float(F.cross_entropy(logits, y))


def rmse(out: Tensor, y: Tensor) -> float:
    return float((out - y).square().mean().sqrt())


def relative_rmse(out: Tensor, y: Tensor) -> float:
    """The root mean square error over the targets' standard deviation."""
    return rmse(out, y) / float(y.std())


def cosine(
    optimizer: torch.optim.Optimizer, steps: int, last: float = 0.0
) -> Callable[[int], None]:
    """Learning rates that fall along half a cosine to a share of the first."""
    first = [group["lr"] for group in optimizer.param_groups]

    def schedule(step: int) -> None:
        share = last + (1 - last) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * share

    return schedule
