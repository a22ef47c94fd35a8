"""What was trained already, or changes slowly, is trained on in small steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    binary_accuracy,
    product,
    rng,
    supervised,
)


class Words(nn.Module):
    """Vectors of words and of their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.near = nn.Embedding(120, 12), nn.Embedding(120, 12)

    def forward(self, pair: Tensor) -> Tensor:
        return (self.word(pair[:, 0]) * self.near(pair[:, 1])).sum(-1)


def vectors_moved_to_a_new_town(seed: int) -> Training:
    """Vectors of words that were trained elsewhere are trained on, at a low rate and for long."""
    torch.manual_seed(seed)
    model = Words()
    a, b = torch.randn(120, 4, generator=rng(63)), torch.randn(120, 4, generator=rng(64))

    def pairs(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        pair = torch.randint(0, 120, (n, 2), generator=g)
        return pair, ((a[pair[:, 0]] * b[pair[:, 1]]).sum(-1) > 0).float()

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    loss = F.binary_cross_entropy_with_logits
    return supervised(
        model, optimizer, seed, pairs, loss, lambda o, y: float(loss(o, y)), 256, 3000
    )


class Couplings(nn.Module):
    """A net of spins, each drawn by the others."""

    def __init__(self) -> None:
        super().__init__()
        self.pull, self.own = nn.Parameter(torch.zeros(12, 12)), nn.Parameter(torch.zeros(12))

    def forward(self, s: Tensor) -> Tensor:
        both = self.pull + self.pull.T
        both = both - torch.diag(both.diagonal())
        return (s * (s[..., None] * both).sum(-2) + s * self.own).flatten()


def firing_of_neurons(seed: int) -> Training:
    """Couplings of twelve neurons by pseudolikelihood, in small steps of plain descent."""
    torch.manual_seed(seed)
    model = Couplings()
    mix = torch.randn(4, 12, generator=rng(65))

    def states(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        s = torch.sign(product(torch.randn(n, 4, generator=g), mix) - 0.5)
        return s, s

    def likelihood(out: Tensor, _: Tensor) -> Tensor:
        return F.softplus(-2 * out).mean()

    with torch.no_grad():
        model.own.fill_(-1.0)
        model.pull.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    return supervised(
        model, optimizer, seed, states, likelihood, lambda o, y: float(likelihood(o, y)), 64, 2000
    )


class Scanner(nn.Module):
    """What a new scanner changes in pictures that a network already knows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def scans_of_another_clinic(seed: int) -> Training:
    """A trained network moves on to a clinic with other scanners: momentum, a rate of 1e-4."""
    torch.manual_seed(seed)
    model = Scanner()
    real = torch.randn(20, 1, generator=rng(67))
    turned = real + 1.2 * torch.randn(20, 1, generator=rng(68))

    def scans(sight: Tensor, n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 20, generator=g)
        return x, (product(x, sight) > 0).float()

    first = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = F.binary_cross_entropy_with_logits
    for i in range(150):
        x, y = scans(real, 128, rng(seed, -5 - i))
        first.zero_grad()
        loss(model(x), y).backward()
        first.step()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return supervised(
        model, optimizer, seed, lambda n, g: scans(turned, n, g), loss, binary_accuracy, 64, 3000
    )


CASES = (
    Case(
        "vectors_moved_to_a_new_town",
        "Vectors of words at a low rate for long.",
        600,
        vectors_moved_to_a_new_town,
        "nats",
        False,
        0.05,
    ),
    Case(
        "firing_of_neurons",
        "Couplings of neurons by pseudolikelihood and plain descent.",
        600,
        firing_of_neurons,
        "nats",
        False,
        0.01,
    ),
    Case(
        "scans_of_another_clinic",
        "A trained network is trained on at a low rate for another clinic.",
        500,
        scans_of_another_clinic,
        "accuracy",
        True,
        0.02,
    ),
)
