"""Trainings at the limits of a format: writes in place, differences of outputs, tiny values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    accuracy,
    generator,
    mlp,
    relative_rmse,
    rmse,
    supervised,
)


class Causal(nn.Module):
    """Attention whose scores are masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)
        self.register_buffer("later", torch.triu(torch.ones(8, 8, dtype=torch.bool), 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        scores = self.query(h) @ self.key(h).transpose(1, 2)
        scores.masked_fill_(self.later, -1e9)
        return self.out(torch.softmax(scores / 4, -1) @ self.value(h) + h)


def masked_in_place(seed: int) -> Training:
    """Whether a token of kind 0 has been seen so far."""
    torch.manual_seed(seed)
    model = Causal()

    def rows(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 6, (count, 8), generator=g)
        return x, ((x == 0).cumsum(1) > 0).long()

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: rows(32, generator(seed, step)),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        rows(500, generator(TEST)),
        accuracy,
    )


class Hubs(nn.Module):
    """The mean of all messages to a node, summed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(2, 8), mlp(8, 16, 1)

    def forward(self, edges: tuple[Tensor, Tensor]) -> Tensor:
        features, target = edges
        h = torch.relu(self.message(features))
        total = h.new_zeros(20, 8)
        total.index_add_(0, target, h)
        count = torch.bincount(target, minlength=20).clamp(min=1)[:, None]
        return self.out(total / count / 100)


def busy_hubs(seed: int) -> Training:
    """Mean load (W, hundreds) of houses at the nodes of a network, of which three have most houses."""
    torch.manual_seed(seed)
    model = Hubs()

    def networks(g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        target = torch.randint(0, 20, (3000,), generator=g)
        target = torch.where(torch.rand(3000, generator=g) < 0.7, target % 3, target)
        level = 100 + 400 * torch.rand(20, generator=g)
        features = level[target][:, None] * (0.5 + torch.rand(3000, 2, generator=g))
        return (features, target), level[:, None] / 100

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        lambda step: networks(generator(seed, step)),
        F.mse_loss,
        networks(generator(TEST)),
        rmse,
    )


class InPlacePower(nn.Module):
    """Power of readings, squared in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        power = h.clone()
        power *= h
        return self.out(torch.log1p(power))


def power_in_place(seed: int) -> Training:
    torch.manual_seed(seed)

    def readings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 500 * torch.randn(count, 4, generator=g)
        return x, torch.log1p((x**2).sum(1, keepdim=True) / 100)

    model = InPlacePower()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        lambda step: readings(128, generator(seed, step)),
        F.mse_loss,
        readings(2000, generator(TEST)),
        rmse,
    )


def curvature_by_differences(seed: int) -> Training:
    """A string under load: its curvature by second differences of a network."""
    torch.manual_seed(seed)
    model = mlp(1, 24, 24, 1, activation=nn.Tanh)

    def loss(step: int) -> Tensor:
        x = torch.rand(64, 1, generator=generator(seed, step))
        e = 0.02
        curvature = (model(x + e) - 2 * model(x) + model(x - e)) / e**2
        ends = model(torch.tensor([[0.0], [1.0]]))
        return F.mse_loss(curvature, -torch.sin(torch.pi * x)) + 10 * (ends**2).mean()

    def evaluate() -> float:
        x = torch.linspace(0, 1, 300)[:, None]
        return relative_rmse(model(x), torch.sin(torch.pi * x) / torch.pi**2)

    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, evaluate)


def momentum_by_differences(seed: int) -> Training:
    """A path whose speed, taken from places a thousandth of a second apart, is known."""
    torch.manual_seed(seed)
    model = mlp(1, 32, 32, 2, activation=nn.Tanh)

    def loss(step: int) -> Tensor:
        t = 2 * torch.rand(64, 1, generator=generator(seed, step))
        speed = (model(t + 1e-4) - model(t)) / 1e-4
        known = torch.cat([torch.cos(3 * t), -torch.sin(2 * t)], 1)
        return F.mse_loss(speed, known) + F.mse_loss(model(0 * t[:1]), torch.zeros(1, 2))

    def evaluate() -> float:
        t = torch.linspace(0, 2, 300)[:, None]
        exact = torch.cat([torch.sin(3 * t) / 3, torch.cos(2 * t) / 2 - 0.5], 1)
        return relative_rmse(model(t), exact)

    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, evaluate)


class Currents(nn.Module):
    """Currents of nanoamperes through learnt conductances, then a gain as an instrument has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conductance, self.out = nn.Linear(6, 12, bias=False), mlp(12, 24, 1)
        with torch.no_grad():
            self.conductance.weight.mul_(1e-9)

    def forward(self, volts: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conductance(volts) * 1e9))


def nanoamperes(seed: int) -> Training:
    torch.manual_seed(seed)
    mixing = torch.randn(6, 3, generator=generator(40))

    def readings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6, generator=g)
        return x, torch.tanh(x @ mixing).prod(1, keepdim=True)

    model = Currents()
    groups = [
        {"params": model.conductance.parameters(), "lr": 5e-12},
        {"params": model.out.parameters()},
    ]
    return supervised(
        model,
        torch.optim.Adam(groups, lr=5e-3, eps=1e-16),
        lambda step: readings(128, generator(seed, step)),
        F.mse_loss,
        readings(2000, generator(TEST)),
        relative_rmse,
    )


CASES = (
    Case("masked_in_place", "A mask in place.", 120, masked_in_place, "accuracy", True, 0.05),
    Case("busy_hubs", "Sums in place.", 120, busy_hubs, "RMSE", False, 0.1),
    Case("power_in_place", "Squares in place.", 200, power_in_place, "RMSE", False, 0.05),
    Case(
        "curvature_by_differences",
        "Second differences.",
        200,
        curvature_by_differences,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "momentum_by_differences",
        "First differences.",
        200,
        momentum_by_differences,
        "relative RMSE",
        False,
        0.1,
    ),
    Case("nanoamperes", "Tiny currents.", 200, nanoamperes, "relative RMSE", False, 0.05),
)
