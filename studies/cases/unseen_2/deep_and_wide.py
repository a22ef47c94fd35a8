"""Words, soil and rocks: sums, powers and many small steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    accuracy,
    cosine,
    mlp,
    product,
    relative_rmse,
    rng,
    supervised,
)


class Parser(nn.Module):
    """Which of two words depends on the other, with cubes for activations."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.hidden, self.out = nn.Embedding(50, 8), nn.Linear(17, 32), nn.Linear(32, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        words, apart = batch
        x = torch.cat([self.word(words).flatten(1), apart], -1)
        h = self.hidden(x) ** 3
        return self.out(F.normalize(h, dim=-1))


def parser_with_cubes(seed: int) -> Training:
    """Dependencies by two words and how many letters apart they are."""
    torch.manual_seed(seed)
    model = Parser()
    kind = torch.randn(50, 3, generator=rng(83))

    def pairs(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        words = torch.randint(0, 50, (n, 2), generator=g)
        apart = torch.randint(-300, 300, (n, 1), generator=g).float()
        score = kind[words[:, 0]] - kind[words[:, 1]] * torch.sign(apart)
        return (words, apart), score.argmax(-1)

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return supervised(model, optimizer, seed, pairs, F.cross_entropy, accuracy, 128, 1000)


class Soil(nn.Module):
    """Soil that follows the weather slowly: a state that moves a little each hour."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.move, self.out = (
            nn.Linear(5, 6),
            mlp(7, 16, 6, act=nn.Tanh),
            nn.Linear(6, 1),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        site, weather = batch
        z = self.start(site)
        for now in weather.unbind(1):
            z = z + 0.004 * self.move(torch.cat([z, now[:, None]], -1))
        return self.out(z)


def soil_over_days(seed: int) -> Training:
    """How wet soil is after twenty-four hours of weather."""
    torch.manual_seed(seed)
    model = Soil()
    effect = torch.randn(5, 1, generator=rng(84)) / 2

    def sites(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        site = torch.randn(n, 5, generator=g)
        weather = torch.randn(n, 1, generator=g) + 0.5 * torch.randn(n, 24, generator=g)
        wet = product(site, effect)
        for now in weather.unbind(1):
            wet = wet + 0.04 * (now[:, None] - 0.3 * wet)
        return (site, weather), wet

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, sites, F.mse_loss, relative_rmse, 64, 500)


class Unscaled(nn.Module):
    """Blocks that add to their input, without any norm until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(mlp(24, 24, 24) for _ in range(12))
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 3)
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, nn.Linear) and layer.out_features == 24:
                    nn.init.kaiming_normal_(layer.weight)
                    layer.weight.mul_(1.6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(self.norm(h))


def blocks_without_norms(seed: int) -> Training:
    """A deep residual network whose only norm stands at its end."""
    torch.manual_seed(seed)
    model = Unscaled()
    sight = torch.randn(8, 3, generator=rng(85))

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 8, generator=g)
        return x, product(x * x.roll(1, -1) + x, sight).argmax(-1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return supervised(
        model, optimizer, seed, rows, F.cross_entropy, accuracy, 128, 1000, clip_norm=1.0
    )


class Slowness(nn.Module):
    """How slow waves are in twenty cells, in seconds a kilometre."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.zeros(20))

    def forward(self, ways: Tensor) -> Tensor:
        return ways @ (0.2 * (1 + 0.01 * self.change))


def travel_times(seed: int) -> Training:
    """Travel-time tomography: cells differ by a hundredth."""
    torch.manual_seed(seed)
    model = Slowness()
    real = torch.randn(20, generator=rng(86))

    def rays(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        ways = 40 * torch.rand(n, 20, generator=g) * (torch.rand(n, 20, generator=g) < 0.3)
        times = product(ways.double(), 0.2 * (1 + 0.01 * real.double())[:, None])[:, 0]
        return ways, times.float() + 0.01 * torch.randn(n, generator=g)

    def off(_o: Tensor, _y: Tensor) -> float:
        return relative_rmse(model.change, real)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return supervised(
        model, optimizer, seed, rays, F.mse_loss, off, 64, 10, schedule=cosine(optimizer, 200)
    )


CASES = (
    Case(
        "parser_with_cubes",
        "Dependencies of words by a network with cubes.",
        120,
        parser_with_cubes,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "soil_over_days",
        "Soil's wetness after a day of weather, in small steps.",
        80,
        soil_over_days,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "blocks_without_norms",
        "A deep residual network without norms.",
        100,
        blocks_without_norms,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "travel_times",
        "Travel-time tomography of cells that differ by a hundredth.",
        200,
        travel_times,
        "relative error",
        False,
        0.1,
    ),
)
