"""Trainings on values far from 0: coordinates, hours, running numbers, temperatures, balances."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    accuracy,
    cosine,
    generator,
    mlp,
    relative_rmse,
    rmse,
    supervised,
)


class FourierFeatures(nn.Module):
    """Sines of a random projection of coordinates."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.projection = nn.Linear(2, 32, bias=False)
        nn.init.normal_(self.projection.weight, std=width)
        self.projection.weight.requires_grad_(False)
        self.body = mlp(64, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        angle = self.projection(x)
        return self.body(torch.cat([angle.sin(), angle.cos()], 1))


def map_features(seed: int) -> Training:
    """Heights on a map whose coordinates are kilometres, 300 to 400."""
    torch.manual_seed(seed)

    def places(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 300 + 100 * torch.rand(count, 2, generator=g)
        return x, torch.sin(x[:, :1] / 9) * torch.cos(x[:, 1:] / 12)

    model = FourierFeatures(0.12)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return supervised(
        model,
        optimizer,
        lambda step: places(256, generator(seed, step)),
        F.mse_loss,
        places(2000, generator(TEST)),
        relative_rmse,
    )


def city_coordinates(seed: int) -> Training:
    """Prices by latitude and longitude within a city, in degrees."""
    torch.manual_seed(seed)
    model = mlp(2, 32, 32, 1)
    with torch.no_grad():  # as if the data had been centred by the first bias
        model[0].weight.mul_(100)
        model[0].bias.copy_(-model[0].weight @ torch.tensor([48.85, 2.35]))

    def flats(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        near = 0.02 * torch.randn(count, 2, generator=g)
        price = torch.exp(-(near**2).sum(1, keepdim=True) / 0.0008)
        return near + torch.tensor([48.85, 2.35]), price

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        lambda step: flats(256, generator(seed, step)),
        F.mse_loss,
        flats(2000, generator(TEST)),
        relative_rmse,
    )


class Seasons(nn.Module):
    """Hours since January to demand, by learnt waves."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(1, 8)
        with torch.no_grad():
            self.waves.weight.copy_(
                6.2832 / torch.tensor([[24.0, 12, 168, 84, 8760, 4380, 8, 6]]).T
            )
        self.body = mlp(16, 24, 1)

    def forward(self, hours: Tensor) -> Tensor:
        angle = self.waves(hours)
        return self.body(torch.cat([angle.sin(), angle.cos()], 1))


def hourly_demand(seed: int) -> Training:
    torch.manual_seed(seed)

    def hours(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.randint(0, 8760, (count, 1), generator=g).float()
        day = torch.sin(6.2832 * t / 24) + 0.5 * torch.sin(6.2832 * t / 12 + 1)
        return t, day + 0.5 * torch.cos(6.2832 * t / 168)

    model = Seasons()
    slow = [{"params": model.waves.parameters(), "lr": 1e-6}, {"params": model.body.parameters()}]
    return supervised(
        model,
        torch.optim.Adam(slow, lr=5e-3),
        lambda step: hours(256, generator(seed, step)),
        F.mse_loss,
        hours(2000, generator(TEST)),
        relative_rmse,
    )


def kelvin(seed: int) -> Training:
    """Air temperatures in kelvin, to a tenth of a degree."""
    torch.manual_seed(seed)
    model = mlp(3, 32, 1, activation=nn.Tanh)
    nn.init.constant_(model[-1].bias, 288.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-2)

    def weather(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 3, generator=g)
        return x, 288 + 8 * torch.sin(6 * x[:, :1]) - 6 * x[:, 1:2]

    return supervised(
        model,
        optimizer,
        lambda step: weather(128, generator(seed, step)),
        F.mse_loss,
        weather(2000, generator(TEST)),
        rmse,
        schedule=cosine(optimizer, 500),
    )


def fine_function(seed: int) -> Training:
    """A function of two variables to three digits."""
    torch.manual_seed(seed)
    model = mlp(2, 48, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(count, 2, generator=g) - 1
        return x, torch.sin(2 * x[:, :1]) * torch.exp(x[:, 1:] / 2) + 1

    return supervised(
        model,
        optimizer,
        lambda step: points(256, generator(seed, step)),
        F.mse_loss,
        points(2000, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 500),
    )


class Balance(nn.Module):
    """What is left: income less spending, each learnt from its own list."""

    def __init__(self) -> None:
        super().__init__()
        self.income, self.spending = nn.Linear(30, 1), nn.Linear(30, 1)
        for part in (self.income, self.spending):
            nn.init.constant_(part.weight, 1.0)
            nn.init.zeros_(part.bias)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.income(x[0]) - self.spending(x[1])


def account_balance(seed: int) -> Training:
    torch.manual_seed(seed)

    def accounts(count: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        income = 100 + 20 * torch.rand(count, 30, generator=g)
        spending = income.flip(1) + 0.3 * torch.randn(count, 30, generator=g)
        return (income, spending), (1.002 * income).sum(1, keepdim=True) - (spending).sum(
            1, keepdim=True
        )

    model = Balance()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-4),
        lambda step: accounts(64, generator(seed, step)),
        F.smooth_l1_loss,
        accounts(1000, generator(TEST)),
        relative_rmse,
    )


def orders_by_number(seed: int) -> Training:
    """Whether an order's running number, up to 6,000, falls on a Monday, by learnt waves."""
    torch.manual_seed(seed)
    waves = nn.Linear(1, 12)
    with torch.no_grad():
        waves.weight.copy_(6.2832 / 7 * torch.arange(1, 13)[:, None])

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves, self.out = waves, nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.sin(self.waves(x)))

    def orders(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        n = torch.randint(0, 6000, (count, 1), generator=g)
        return n.float(), (n[:, 0] % 7 < 3).long()

    model = Waves()
    return supervised(
        model,
        torch.optim.Adam(model.out.parameters(), lr=2e-2),
        lambda step: orders(128, generator(seed, step)),
        F.cross_entropy,
        orders(2000, generator(TEST)),
        accuracy,
    )


CASES = (
    Case("map_features", "Heights on a map.", 250, map_features, "relative RMSE", False, 0.05),
    Case("city_coordinates", "Degrees.", 250, city_coordinates, "relative RMSE", False, 0.05),
    Case("hourly_demand", "Hours of a year.", 250, hourly_demand, "relative RMSE", False, 0.05),
    Case("kelvin", "Kelvin.", 500, kelvin, "RMSE in K", False, 0.1),
    Case("fine_function", "Three digits.", 500, fine_function, "relative RMSE", False, 0.002),
    Case("account_balance", "A balance.", 300, account_balance, "relative RMSE", False, 0.1),
    Case("orders_by_number", "Running numbers.", 250, orders_by_number, "accuracy", True, 0.05),
)
