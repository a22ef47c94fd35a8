"""What the cases share: draws by seed and step, the data that ships with the libraries, metrics."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pydoc_data import topics
from typing import TYPE_CHECKING

import torch
from sklearn import datasets
from torch import Tensor, nn

from cases.case import Training

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = ()
"""This file has none."""

Split = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets to train on, inputs and targets to test on."""


def draws(seed: int, index: int = -1) -> torch.Generator:
    """The random numbers of a step (from 0) of a seed; -1 is what is drawn before training."""
    return torch.Generator().manual_seed(1_000_003 * seed + index + 1)


def fixed(number: int) -> torch.Generator:
    """Random numbers that are the same for every seed, for data that is generated."""
    return torch.Generator().manual_seed(77_000 + number)


def rows(count: int, size: int, seed: int, index: int) -> Tensor:
    """The rows of a step's batch, drawn with replacement."""
    return torch.randint(count, (size,), generator=draws(seed, index))


def split(inputs: Tensor, targets: Tensor, test: int) -> Split:
    """Shuffled, always in the same way; the last ``test`` rows are for testing."""
    order = torch.randperm(len(inputs), generator=fixed(0))
    train, held = order[:-test], order[-test:]
    return inputs[train], targets[train], inputs[held], targets[held]


@cache
def digits() -> Split:
    """Digits of 8 × 8 pixels: inputs [N, 64] from 0 to 1, labels from 0 to 9."""
    found = datasets.load_digits()
    return split(torch.tensor(found.data).float() / 16, torch.tensor(found.target), 500)


@cache
def table(name: str, test: int, *, standardised: bool = True) -> Split:
    """A table that ships with scikit-learn: ``wine``, ``breast_cancer``, ``diabetes`` or ``iris``."""
    found = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    x = torch.tensor(found.data).float()
    if standardised:
        x = (x - x.mean(0)) / x.std(0)
    return split(x, torch.tensor(found.target), test)


@cache
def photograph(size: int) -> Tensor:
    """The middle of scikit-learn's photograph of a temple: [3, size, size] from 0 to 1."""
    image = torch.tensor(datasets.load_sample_images().images[0]).permute(2, 0, 1).float() / 255
    small = nn.functional.interpolate(image[None], size=(size, size * 3 // 2), mode="area")[0]
    start = size // 4
    return small[:, :, start : start + size].contiguous()


@cache
def text() -> str:
    """What Python's help says about the language itself."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


@cache
def words(vocabulary: int) -> Tensor:
    """That text as words: the index of each, by frequency; 0 is every rare one."""
    found = text().lower().split()
    counts: dict[str, int] = {}
    for word in found:
        counts[word] = counts.get(word, 0) + 1
    common = sorted(counts, key=lambda w: (-counts[w], w))[: vocabulary - 1]
    index = {word: i + 1 for i, word in enumerate(common)}
    return torch.tensor([index.get(word, 0) for word in found])


@cache
def letters() -> Tensor:
    """That text as letters, 0 to 27: a to z, the space, and all else."""
    order = {chr(97 + i): i for i in range(26)} | {" ": 26, "\n": 26}
    return torch.tensor([order.get(c, 27) for c in text().lower()])


def perceptron(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        layers += [activation()] if i else []
        layers.append(nn.Linear(n_in, n_out))
    return nn.Sequential(*layers)


class InUnits(nn.Module):
    """A network that answers in a handy unit; what leaves the model is in the base unit."""

    def __init__(self, net: nn.Module, unit: float) -> None:
        super().__init__()
        self.net = net
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net(x) * self.unit
        return answer


def accuracy(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], float]:
    """The share of rows whose largest logit is the label's."""

    def evaluate() -> float:
        with torch.no_grad():
            return float((predict(x).argmax(-1) == y).float().mean())

    return evaluate


def cross_entropy(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], float]:
    """The mean cross entropy in nats; inputs beyond FP32's range give NaN."""

    def evaluate() -> float:
        with torch.no_grad():
            logits = predict(x).flatten(0, -2)
            return float(nn.functional.cross_entropy(logits, y.flatten()))

    return evaluate


def rmse(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], float]:
    """The root mean square error, in the targets' unit."""

    def evaluate() -> float:
        with torch.no_grad():
            return float((predict(x) - y).square().mean().sqrt())

    return evaluate


def cosine(
    optimizer: torch.optim.Optimizer, peak: float, steps: int, warm: int = 0
) -> Callable[[int], None]:
    """A linear warm-up over ``warm`` steps, then half a cosine down to nothing."""

    def schedule(index: int) -> None:
        share = (index - warm) / max(steps - warm, 1)
        down = 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = peak * ((index + 1) / warm if index < warm else down)

    return schedule


def fitted(
    model: nn.Module,
    batch: Callable[[torch.Generator, int], tuple[Tensor, Tensor]],
    seed: int,
    *,
    optimizer: torch.optim.Optimizer,
    size: int,
    steps: int,
    peak: float,
    clip_norm: float | None = None,
) -> Training:
    """A regression by the mean square error; the metric is the error over the targets' deviation."""

    def loss(index: int) -> Tensor:
        x, y = batch(draws(seed, index), size)
        return nn.functional.mse_loss(model(x), y)

    x, y = batch(fixed(101), 1000)
    measure = rmse(model, x, y)

    def evaluate() -> float:
        model.eval()
        return measure() / float(y.std())

    return Training(
        model,
        optimizer,
        loss,
        evaluate,
        clip_norm=clip_norm,
        schedule=cosine(optimizer, peak, steps),
    )
