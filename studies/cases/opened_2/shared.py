"""Random numbers, data and small models that several families of cases use."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Training

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_OUT = 4_242_424
"""The seed of every test set."""


def draw(seed: int, step: int = 0) -> torch.Generator:
    """Random numbers of a seed and a step."""
    return torch.Generator().manual_seed(1_000_211 * (seed + 1) + 7_877 * step)


def dense(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths with an activation between them."""
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), act()]
    return nn.Sequential(*parts[:-1])


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    sample: Callable[[int, torch.Generator], tuple[Any, Tensor]],
    criterion: Callable[[Tensor, Tensor], Tensor],
    score: Callable[[Tensor, Tensor], float],
    size: int = 64,
    test_size: int = 1000,
    **options: Any,
) -> Training:
    """A supervised training on fresh samples, scored on others."""
    held_out = sample(test_size, draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        x, y = sample(size, draw(seed, step))
        return criterion(model(x), y)

    def evaluate() -> float:
        model.eval()
        return score(model(held_out[0]), held_out[1])

    return Training(model, optimizer, loss, evaluate, **options)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` for data, which no autocast rounds.

    Args:
        x: Rows (n, k).
        matrix: (k, m).
    """
    return (x[..., None] * matrix).sum(-2)


def root_mse(out: Tensor, y: Tensor) -> float:
    return float(F.mse_loss(out, y).sqrt())


def share_unexplained(out: Tensor, y: Tensor) -> float:
    """Root mean square error over the targets' standard deviation."""
    return float((out - y).square().mean().sqrt() / y.std())


def hits(out: Tensor, y: Tensor) -> float:
    return float((out.argmax(-1) == y).float().mean())


def decay(
    optimizer: torch.optim.Optimizer, steps: int, last: float = 0.01
) -> Callable[[int], None]:
    """Learning rates that fall evenly in the logarithm to a share of the first."""
    first = [g["lr"] for g in optimizer.param_groups]

    def schedule(step: int) -> None:
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * last ** (step / steps)

    return schedule


@functools.cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """A data set of scikit-learn in its own units, shuffled."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.randperm(len(y), generator=draw(1))
    return x[order], y[order]


def of_table(
    name: str, prepare: Callable[[Tensor], Tensor] = lambda x: x, test: int = 4
) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    """Samples of a data set: one in ``test`` rows for the held-out set, the others for training."""
    x, y = table(name)
    x = prepare(x)
    held = torch.arange(len(y)) % test == 0

    def sample(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        if g.initial_seed() == draw(HELD_OUT).initial_seed():
            return x[held], y[held]
        rows = torch.nonzero(~held).flatten()
        rows = rows[torch.randint(0, len(rows), (count,), generator=g)]
        return x[rows], y[rows]

    return sample


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)
