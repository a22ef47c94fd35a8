"""Ordinary small trainings, as tutorials have them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from cases.case import Case, Training


def generator(seed: int, step: int = 0) -> torch.Generator:
    """Random numbers that depend on the seed and the step alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step * 7919 + 17)


def moons(count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two interleaved half circles with noise; points (n, 2) and classes (n,)."""
    angle = torch.rand(count, generator=g) * torch.pi
    kind = torch.randint(0, 2, (count,), generator=g)
    x = torch.where(kind == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(kind == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.15 * torch.randn(count, 2, generator=g)
    return points, kind


def moons_mlp(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> torch.Tensor:
        x, y = moons(64, generator(seed, step))
        return F.cross_entropy(model(x), y)

    def evaluate() -> float:
        x, y = moons(2000, generator(12345))
        return float((model(x).argmax(1) == y).float().mean())

    return Training(model, optimizer, loss, evaluate)


class Rotary(nn.Module):
    """Angles of positions through a product in the format."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.1, 1.0, 3.0]))
        self.scale = nn.Linear(1, 1)
        self.out = nn.Linear(6, 1)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        angle = self.scale(t) * self.rate
        return self.out(torch.cat([angle.sin(), angle.cos()], 1))


def position_wave(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Rotary()
    with torch.no_grad():
        model.scale.weight.fill_(1.0)
    optimizer = torch.optim.Adam(model.out.parameters(), lr=1e-2)

    def loss(step: int) -> torch.Tensor:
        t = torch.randint(0, 4000, (64, 1), generator=generator(seed, step)).float()
        return F.mse_loss(model(t), torch.sin(t))

    def evaluate() -> float:
        t = torch.arange(0, 4000, 7).float()[:, None]
        return float(F.mse_loss(model(t), torch.sin(t)))

    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case(
        "moons_mlp",
        "An MLP on two interleaved half circles.",
        300,
        moons_mlp,
        "accuracy",
        True,
        0.02,
    ),
    Case("position_wave", "A wave.", 200, position_wave, "mse", False, 0.02),
)
