"""Trainings on what comes out of a database: dates, places, prices and masses, as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import dense, fit, hits, share_unexplained


class Places(nn.Module):
    """Quarters of a town by degrees; the first layer has the standardisation folded in."""

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.out = nn.Linear(2, 2), dense(2, 24, 4)
        with torch.no_grad():
            self.fold.weight.copy_(80 * torch.eye(2))
            self.fold.bias.copy_(-80 * torch.tensor([48.14, 11.58]))

    def forward(self, degrees: Tensor) -> Tensor:
        return self.out(self.fold(degrees))


def quarters_of_town(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Places()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        z = torch.randn(n, 2, generator=g)
        kind = (z[:, 0] > 0.2).long() + 2 * (z[:, 1] > z[:, 0]).long()
        return torch.tensor([48.14, 11.58]) + z / 80, kind

    optimizer = torch.optim.Adam(model.out.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, places, F.cross_entropy, hits)


class Weekday(nn.Module):
    """Sales by the day since 1970 and its fraction: waves of a day and of a week."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.out = nn.Linear(1, 4), dense(4, 16, 1)
        self.waves.requires_grad_(False)
        with torch.no_grad():
            turn = 2 * torch.pi
            self.waves.weight.copy_(torch.tensor([[turn], [turn], [turn / 7], [turn / 7]]))
            self.waves.bias.copy_(torch.tensor([0.0, turn / 4, 0.0, turn / 4]))

    def forward(self, day: Tensor) -> Tensor:
        return self.out(torch.sin(self.waves(day)))


def sales_by_date(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Weekday()

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        day = 18_000 + torch.randint(0, 96_000, (n, 1), generator=g) / 48
        turn = 2 * torch.pi * (day % 7)
        return day, torch.sin(turn) + 0.5 * torch.cos(turn / 7)

    optimizer = torch.optim.Adam(model.out.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, days, F.mse_loss, share_unexplained)


class Peaks(nn.Module):
    """Which of five substances a peak is, by its mass to a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Linear(1, 16), nn.Linear(16, 5)
        centre = torch.linspace(-2, 2, 16)
        with torch.no_grad():
            self.scale.weight.fill_(40.0)
            self.scale.bias.copy_(-40.0 * 445.12 - 2 * centre)

    def forward(self, mass: Tensor) -> Tensor:
        return self.out(torch.tanh(self.scale(mass)))


def mass_peaks(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Peaks()

    def peaks(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 5, (n, 1), generator=g)
        return 445.08 + 0.02 * kind + 0.003 * torch.randn(n, 1, generator=g), kind[:, 0]

    optimizer = torch.optim.Adam(model.out.parameters(), lr=5e-2)
    return fit(model, optimizer, seed, peaks, F.cross_entropy, hits)


class Trend(nn.Module):
    """A curve through years."""

    def __init__(self) -> None:
        super().__init__()
        self.year = nn.Linear(1, 1)
        self.out = nn.Linear(3, 1)
        with torch.no_grad():
            self.year.weight.fill_(1.0)
            self.year.bias.fill_(0.0)

    def forward(self, year: Tensor) -> Tensor:
        y = self.year(year)
        z = torch.cat([y / 2000 - 1, (y * y - 4e6) / 1e5, torch.ones_like(y)], -1)
        return self.out(z)


def warming(seed: int) -> Training:
    """Temperatures by years and their squares."""
    torch.manual_seed(seed)
    model = Trend()

    def years(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        year = 1960 + 64 * torch.rand(n, 1, generator=g)
        return year, ((year - 1990) / 30) + 0.2 * torch.randn(n, 1, generator=g)

    optimizer = torch.optim.Adam(model.out.parameters(), lr=3e-2)
    return fit(model, optimizer, seed, years, F.mse_loss, share_unexplained)


class Gate(nn.Module):
    """Raw readings of up to 20,000 decide on a gate alone; the answer comes from others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(2, 8), nn.Linear(5, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        raw, x = batch
        return self.out(torch.sigmoid(self.gate(raw)) * torch.tanh(self.body(x)))


def gated_by_raw(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Gate()

    def rows(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        raw = 20_000 * (2 * torch.rand(n, 2, generator=g) - 1)
        x = torch.randn(n, 5, generator=g)
        return (raw, x), torch.tanh(x[:, :1]) * (raw[:, :1] > 0) + torch.tanh(x[:, 1:2])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, rows, F.mse_loss, share_unexplained)


CASES = (
    Case("quarters_of_town", "Degrees.", 100, quarters_of_town, "accuracy", True, 0.05),
    Case("sales_by_date", "Days.", 100, sales_by_date, "unexplained", False, 0.05),
    Case("mass_peaks", "Masses.", 100, mass_peaks, "accuracy", True, 0.05),
    Case("warming", "Years.", 120, warming, "unexplained", False, 0.05),
    Case("gated_by_raw", "A gate.", 120, gated_by_raw, "unexplained", False, 0.05),
)
