"""Trainings that need digits, or range, in the middle: positions, offsets, differences, squares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    accuracy,
    digit_batch,
    digits,
    generator,
    mlp,
    relative_rmse,
    rmse,
    supervised,
)


class Rotary(nn.Module):
    """Attention over places up to 3,000 whose angles follow the width of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.exp(torch.linspace(0, -4, 8)), requires_grad=False)
        self.query, self.key = nn.Linear(4, 16), nn.Linear(4, 16)
        self.value, self.out = nn.Linear(4, 16), nn.Linear(16, 1)

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        angle = places.to(x.dtype)[..., None] * self.rates.to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, places = batch
        q, k = self.turned(self.query(x), places), self.turned(self.key(x), places)
        weights = torch.softmax(q @ k.transpose(1, 2), -1)
        return self.out(weights @ self.value(x)).squeeze(-1)


def far_places(seed: int) -> Training:
    """Each element is told by the one two places before."""
    torch.manual_seed(seed)
    model = Rotary()

    def rows(count: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = torch.randn(count, 12, 4, generator=g)
        places = torch.randint(0, 3000, (count, 1), generator=g) + torch.arange(12)
        return (x, places.float()), x[:, :, 0].roll(2, 1)

    def late(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out[:, 2:], y[:, 2:])

    return supervised(
        model,
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        lambda step: rows(32, generator(seed, step)),
        late,
        rows(500, generator(TEST)),
        lambda out, y: float(late(out, y)),
    )


class Spread(nn.Module):
    """A set's variance as the mean of squares less the square of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(1, 8), mlp(16, 24, 1)
        nn.init.uniform_(self.first.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mean = h.mean(1)
        variance = (h * h).mean(1) - mean * mean
        return self.out(torch.cat([variance, mean / 32], 1))


def spread_of_sets(seed: int) -> Training:
    torch.manual_seed(seed)

    def sets(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        width = 0.2 + torch.rand(count, 1, 1, generator=g)
        x = 30 + width * torch.randn(count, 40, 1, generator=g)
        return x, x.var(1)

    model = Spread()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda step: sets(64, generator(seed, step)),
        F.mse_loss,
        sets(1000, generator(TEST)),
        relative_rmse,
    )


class Neighbours(nn.Module):
    """A smooth function by distances to anchors, expanded into products."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = nn.Parameter(20 + 4 * torch.rand(40, 2), requires_grad=False)
        self.out = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = x @ self.anchors.T
        far = (x * x).sum(1, keepdim=True) + (self.anchors**2).sum(1) - 2 * both
        return self.out(torch.exp(-far))


def kernel_regression(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Neighbours()

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 20 + 4 * torch.rand(count, 2, generator=g)
        return x, torch.sin(2 * x[:, :1]) * torch.cos(x[:, 1:])

    return supervised(
        model,
        torch.optim.Adam(model.out.parameters(), lr=2e-2),
        lambda step: points(256, generator(seed, step)),
        F.mse_loss,
        points(2000, generator(TEST)),
        relative_rmse,
    )


class Energy(nn.Module):
    """Power of readings in volts: squares of hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        power = h * h
        return self.out(torch.log1p(power))


def mains_power(seed: int) -> Training:
    torch.manual_seed(seed)

    def readings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 400 * torch.randn(count, 6, generator=g)
        return x, torch.log1p((x**2).sum(1, keepdim=True) / 100)

    model = Energy()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-2),
        lambda step: readings(128, generator(seed, step)),
        F.mse_loss,
        readings(2000, generator(TEST)),
        relative_rmse,
    )


class UnitVectors(nn.Module):
    """Directions of small movements (metres), normalised by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.mix.weight)
        self.out = mlp(3, 24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        length = torch.sqrt((h * h).sum(1, keepdim=True) + 1e-12)
        return self.out(h / length)


def movement_directions(seed: int) -> Training:
    torch.manual_seed(seed)

    def moves(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        direction = torch.randn(count, 3, generator=g)
        kind = (direction[:, 0] > 0).long() + 2 * (direction[:, 1] > direction[:, 2]).long()
        return 1e-4 * direction, kind

    model = UnitVectors()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        lambda step: moves(128, generator(seed, step)),
        F.cross_entropy,
        moves(2000, generator(TEST)),
        accuracy,
    )


def confident_classes(seed: int) -> Training:
    """Classes far apart, and a cross-entropy written with clamped probabilities."""
    torch.manual_seed(seed)
    model = mlp(2, 16, 1)

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 2, (count, 1), generator=g).float()
        return 6 * (2 * y - 1) + torch.randn(count, 2, generator=g), y

    def written_out(out: Tensor, y: Tensor) -> Tensor:
        p = torch.sigmoid(out).clamp(1e-6, 1 - 1e-6)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        lambda step: points(64, generator(seed, step)),
        written_out,
        points(2000, generator(TEST)),
        lambda out, y: float(F.binary_cross_entropy_with_logits(out, y)),
    )


class PaddedNorm(nn.Module):
    """A normalisation by hand; rows of padding are all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 24, bias=False), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        centred = h - h.mean(-1, keepdim=True)
        h = centred / (centred.abs().amax(-1, keepdim=True) + 1e-8)
        return self.out(torch.relu(h)).sum(1)


def padded_rows(seed: int) -> Training:
    torch.manual_seed(seed)

    def rows(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6, 8, generator=g)
        there = torch.arange(6) < torch.randint(1, 7, (count, 1), generator=g)
        x = x * there[..., None]
        return x, (x[:, :, 0] > 0).float().sum(1, keepdim=True)

    model = PaddedNorm()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        lambda step: rows(64, generator(seed, step)),
        F.mse_loss,
        rows(2000, generator(TEST)),
        relative_rmse,
    )


class PixelAttention(nn.Module):
    """Attention over pixels of 0 to 255, without a normalisation before it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 16, bias=False) for _ in range(3))
        self.out = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = torch.softmax((q @ k.transpose(1, 2)) / 5000, -1)
        return self.out((weights @ v).flatten(1) / 255)


def raw_pixels_attention(seed: int) -> Training:
    torch.manual_seed(seed)
    model = PixelAttention()

    def rows(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return 255 * batch[0].squeeze(1), batch[1]

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: rows(digit_batch(seed, step)),
        F.cross_entropy,
        rows(digits()[2:]),
        accuracy,
    )


class Euler(nn.Module):
    """A learnt motion, integrated in small steps."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.speed = nn.Linear(2, 4), mlp(4, 16, 4, activation=nn.Tanh)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for _ in range(16):
            h = h + 0.06 * self.speed(h)
        return self.out(h)


def small_steps(seed: int) -> Training:
    torch.manual_seed(seed)
    turn = torch.tensor([[0.54, -0.84], [0.84, 0.54]])

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 2, generator=g)
        return x, x @ turn

    model = Euler()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        lambda step: points(64, generator(seed, step)),
        F.mse_loss,
        points(1000, generator(TEST)),
        relative_rmse,
    )


def slope_penalty(seed: int) -> Training:
    """A smooth fit whose slope is taken by finite differences."""
    torch.manual_seed(seed)
    model = mlp(1, 32, 32, 1, activation=nn.Tanh)

    def loss(step: int) -> Tensor:
        x = 4 * torch.rand(64, 1, generator=generator(seed, step)) - 2
        slope = (model(x + 1e-3) - model(x)) / 1e-3
        return F.mse_loss(slope, torch.cos(2 * x)) + F.mse_loss(model(0 * x[:1]), 0 * x[:1])

    def evaluate() -> float:
        x = torch.linspace(-2, 2, 500)[:, None]
        return rmse(model(x), torch.sin(2 * x) / 2)

    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, evaluate)


CASES = (
    Case("far_places", "Rotary angles.", 250, far_places, "mean square error", False, 0.05),
    Case("spread_of_sets", "Variances.", 250, spread_of_sets, "relative RMSE", False, 0.05),
    Case("kernel_regression", "Distances.", 250, kernel_regression, "relative RMSE", False, 0.05),
    Case("mains_power", "Squares of volts.", 250, mains_power, "relative RMSE", False, 0.05),
    Case("movement_directions", "Small vectors.", 250, movement_directions, "accuracy", True, 0.03),
    Case("confident_classes", "Clamped.", 250, confident_classes, "cross-entropy", False, 0.01),
    Case("padded_rows", "Rows of padding.", 200, padded_rows, "relative RMSE", False, 0.05),
    Case("raw_pixels_attention", "0–255.", 200, raw_pixels_attention, "accuracy", True, 0.03),
    Case("small_steps", "A motion.", 120, small_steps, "relative RMSE", False, 0.02),
    Case("slope_penalty", "Finite differences.", 300, slope_penalty, "RMSE", False, 0.05),
)
