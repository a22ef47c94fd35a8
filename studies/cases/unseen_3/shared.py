"""A training on a fixed set of examples, which most of these cases are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cases.case import Training
from cases.unseen_2.shared import TEST, rng

if TYPE_CHECKING:
    from collections.abc import Callable


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    data: tuple[Tensor, ...],
    criterion: Callable[..., Tensor],
    measure: Callable[..., float],
    *,
    train: int,
    batch: int = 64,
    **options: Any,
) -> Training:
    """A training on batches of the first rows of a data set, measured on all others.

    Each tensor of ``data`` has one row for each example. ``criterion`` gets a batch of each, ``measure``
    the rows from ``train`` on.
    """

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, train, (batch,), generator=rng(seed, step))
        return criterion(*(d[rows] for d in data))

    def evaluate() -> float:
        model.eval()
        return measure(*(d[train:] for d in data))

    return Training(model, optimizer, loss, evaluate, **options)


def shuffled(*data: Tensor) -> tuple[Tensor, ...]:
    """The rows in an order that is always the same."""
    order = torch.randperm(len(data[0]), generator=rng(TEST))
    return tuple(d[order] for d in data)


def standardized(x: Tensor) -> Tensor:
    """Columns of mean 0 and standard deviation 1."""
    return (x - x.mean(0)) / x.std(0)


def digits() -> tuple[Tensor, Tensor]:
    """Pictures (1797, 1, 8, 8) from 0 to 1, and what they show."""
    from sklearn import datasets

    data = datasets.load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return shuffled(x, torch.tensor(data.target))  # type: ignore[return-value]


def manual(length: int) -> tuple[Tensor, ...]:
    """Parts of the Python manual as codes from 0 to 95, (n, length + 1)."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    codes = torch.tensor([min(max(ord(c) - 31, 0), 95) for c in text[:120_000]])
    rows = codes[: len(codes) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return shuffled(rows)


def area_under_curve(score: Tensor, y: Tensor) -> float:
    """The probability that a positive example has a higher score than a negative one."""
    positive, negative = score[y > 0.5], score[y <= 0.5]
    over = positive[:, None] - negative
    return float((over > 0).float().mean() + 0.5 * (over == 0).float().mean())
