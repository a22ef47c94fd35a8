"""Instruments and their constants: few parameters, each with a meaning and a unit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    cosine,
    product,
    rng,
    supervised,
)


class Pointing(nn.Module):
    """Where a telescope's mount is zero, in degrees, and how its axis leans."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.tensor([180.0, 45.0]))
        self.lean = nn.Parameter(torch.zeros(2))

    def forward(self, angles: Tensor) -> Tensor:
        turn = torch.deg2rad(angles[:, 0])
        up = self.lean[0] * torch.cos(turn) + self.lean[1] * torch.sin(turn)
        return angles - self.zero + torch.stack([up * 0, up], -1)


def pointing_of_a_telescope(seed: int) -> Training:
    """Stars are seen beside where they should be; to some seconds of arc."""
    torch.manual_seed(seed)
    model, real = Pointing(), Pointing()
    with torch.no_grad():
        real.zero.copy_(torch.tensor([180.3127, 44.8719]))
        real.lean.copy_(torch.tensor([0.05, -0.02]))

    def stars(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = torch.rand(n, 2, generator=g) * torch.tensor([360.0, 90.0])
        with torch.no_grad():
            return angles, real(angles) + 0.002 * torch.randn(n, 2, generator=g)

    def arc_seconds(_out: Tensor, _y: Tensor) -> float:
        return 3600 * float((model.zero - real.zero).abs().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return supervised(
        model, optimizer, seed, stars, F.mse_loss, arc_seconds, 32, 10,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


class Bar(nn.Module):
    """How long a bar is: its length at 20 degrees and its expansion per degree."""

    def __init__(self) -> None:
        super().__init__()
        self.expansion = nn.Parameter(torch.tensor(1.0e-5))
        self.length = nn.Parameter(torch.tensor(0.0))

    def forward(self, batch: Tensor) -> Tensor:
        metres, degrees = batch.unbind(-1)
        return 1e3 * metres * self.expansion * (degrees - 20) + self.length


def expanding_bars(seed: int) -> Training:
    """The expansion of steel per degree, from bars of some metres; they grow by millimetres."""
    torch.manual_seed(seed)
    model = Bar()

    def bars(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        metres, degrees = 1 + 3 * torch.rand(n, generator=g), 80 * torch.rand(n, generator=g) - 20
        grown = 1e3 * metres * 1.1737e-5 * (degrees - 20)
        return torch.stack([metres, degrees], -1), grown + 0.01 * torch.randn(n, generator=g)

    optimizer = torch.optim.Adam(
        [{"params": [model.expansion], "lr": 5e-8}, {"params": [model.length], "lr": 1e-2}]
    )

    def per_mille(_out: Tensor, _y: Tensor) -> float:
        return 1e3 * abs(float(model.expansion) / 1.1737e-5 - 1)

    return supervised(
        model, optimizer, seed, bars, F.mse_loss, per_mille, 64, 10,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


class Beam(nn.Module):
    """The deflection of beams in millimetres by their modulus in pascal."""

    def __init__(self) -> None:
        super().__init__()
        self.modulus = nn.Parameter(torch.tensor(1.8e11))

    def forward(self, batch: Tensor) -> Tensor:
        newton, metres = batch.unbind(-1)
        return 1e3 * newton * metres**3 / (48 * self.modulus * 8e-7)


def modulus_of_steel(seed: int) -> Training:
    """Young's modulus from the deflection of beams."""
    torch.manual_seed(seed)
    model, real = Beam(), Beam()
    with torch.no_grad():
        real.modulus.fill_(2.06e11)

    def beams(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        load = torch.stack([200 * torch.rand(n, generator=g), 1 + torch.rand(n, generator=g)], -1)
        with torch.no_grad():
            return load, real(load) * (1 + 0.01 * torch.randn(n, generator=g))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e9, eps=1e-30)

    def per_cent(_out: Tensor, _y: Tensor) -> float:
        return 100 * abs(float(model.modulus) / 2.06e11 - 1)

    return supervised(
        model, optimizer, seed, beams, F.mse_loss, per_cent, 64, 10,
        schedule=cosine(optimizer, 120),
    )  # fmt: skip


class Mains(nn.Module):
    """A wave of the mains: frequency in hertz, and its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.hertz = nn.Parameter(torch.tensor(50.0))
        self.parts = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, t: Tensor) -> Tensor:
        phase = 2 * math.pi * self.hertz * t
        return self.parts[0] * torch.sin(phase) + self.parts[1] * torch.cos(phase)


def frequency_of_the_mains(seed: int) -> Training:
    """The frequency of the mains over two seconds, to a millihertz."""
    torch.manual_seed(seed)
    model, real = Mains(), Mains()
    with torch.no_grad():
        real.hertz.fill_(50.0443)
        real.parts.copy_(torch.tensor([0.9, 0.3]))

    def samples(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = 2 * torch.rand(n, generator=g)
        with torch.no_grad():
            return t, real(t) + 0.05 * torch.randn(n, generator=g)

    optimizer = torch.optim.Adam(
        [{"params": [model.hertz], "lr": 2e-3}, {"params": [model.parts], "lr": 1e-2}]
    )

    def millihertz(_out: Tensor, _y: Tensor) -> float:
        return 1e3 * abs(float(model.hertz - real.hertz))

    return supervised(
        model, optimizer, seed, samples, F.mse_loss, millihertz, 128, 10,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


class Enzyme(nn.Module):
    """How fast enzymes work, by concentrations in mol per litre."""

    def __init__(self) -> None:
        super().__init__()
        self.most = nn.Parameter(torch.tensor(1.0))
        self.half_at = nn.Parameter(torch.tensor([1e-6, 1e-6]))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        amount, kind = batch
        return self.most * amount / (self.half_at[kind] + amount)


def enzymes_by_michaelis(seed: int) -> Training:
    """Michaelis constants of two enzymes, in mol per litre."""
    torch.manual_seed(seed)
    model, real = Enzyme(), Enzyme()
    with torch.no_grad():
        real.most.fill_(1.4)
        real.half_at.copy_(torch.tensor([6.1e-7, 2.27e-6]))

    def assays(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        amount = 1e-7 * torch.exp(4 * torch.rand(n, generator=g))
        kind = torch.randint(0, 2, (n,), generator=g)
        with torch.no_grad():
            return (amount, kind), real((amount, kind)) + 0.01 * torch.randn(n, generator=g)

    optimizer = torch.optim.Adam(
        [{"params": [model.most], "lr": 1e-2}, {"params": [model.half_at], "lr": 3e-8}]
    )

    def log_error(_out: Tensor, _y: Tensor) -> float:
        return float((model.half_at / real.half_at).log().abs().max())

    return supervised(
        model, optimizer, seed, assays, F.mse_loss, log_error, 64, 10,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


def spam_by_pegasos(seed: int) -> Training:
    """A linear machine with a margin by Pegasos: its rates fall as one over the step."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    real = torch.randn(40, 1, generator=rng(61))

    def letters(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 40, generator=g) / 6
        return x, (product(x, real) + 0.5 * torch.randn(n, 1, generator=g) > 0).float()

    def hinge(out: Tensor, y: Tensor) -> Tensor:
        return F.relu(1 - (2 * y - 1) * out).mean() + 5e-4 * model.weight.square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1 / (1e-3 * (step + 50))

    return supervised(
        model, optimizer, seed, letters, hinge, lambda o, y: float(hinge(o, y)), 16, 3000,
        schedule=schedule,
    )  # fmt: skip


class Stations(nn.Module):
    """Places of six stations in metres on a national grid."""

    def __init__(self, guess: Tensor) -> None:
        super().__init__()
        self.place = nn.Parameter(guess)

    def forward(self, pair: Tensor) -> Tensor:
        apart = self.place[pair[:, 0]] - self.place[pair[:, 1]]
        return apart.square().sum(-1).sqrt()


def network_of_stations(seed: int) -> Training:
    """Distances between stations are measured to centimetres; where do the stations stand?"""
    torch.manual_seed(seed)
    g = rng(62)
    real = 3500 + 2000 * torch.rand(6, 2, generator=g)
    model = Stations(real + 2 * torch.randn(6, 2, generator=rng(seed)))
    pairs = torch.combinations(torch.arange(6), 2)
    apart = (real[pairs[:, 0]] - real[pairs[:, 1]]).norm(dim=-1)

    def measured(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(pairs), (n,), generator=g)
        return pairs[rows], apart[rows] + 0.01 * torch.randn(n, generator=g)

    def centimetres(_out: Tensor, _y: Tensor) -> float:
        return 100 * float((model(pairs) - apart).abs().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    return supervised(
        model, optimizer, seed, measured, F.mse_loss, centimetres, 32, 10,
        schedule=cosine(optimizer, 250),
    )  # fmt: skip


class ZeroPoints(nn.Module):
    """Zero points of five nights in magnitudes, and a slope by height."""

    def __init__(self) -> None:
        super().__init__()
        self.zero, self.slope = nn.Parameter(torch.full((5,), 25.0)), nn.Parameter(torch.zeros(1))

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        counts, night, air = batch
        return self.zero[night] - counts + self.slope * air


def zero_points_of_nights(seed: int) -> Training:
    """A survey's zero points, wanted to some thousandths of a magnitude."""
    torch.manual_seed(seed)
    model = ZeroPoints()
    real = 25.2 + 0.3 * torch.randn(5, generator=rng(66))

    def stars(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        counts, air = 10 + 2 * torch.randn(n, generator=g), torch.rand(n, generator=g)
        night = torch.randint(0, 5, (n,), generator=g)
        seen = real[night] - counts - 0.12 * air + 0.02 * torch.randn(n, generator=g)
        return (counts, night, air), seen

    def thousandths(_out: Tensor, _y: Tensor) -> float:
        return 1e3 * float((model.zero - real).abs().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return supervised(
        model, optimizer, seed, stars, F.mse_loss, thousandths, 64, 10,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


CASES = (
    Case(
        "pointing_of_a_telescope",
        "Zero points of a telescope's mount, in degrees.",
        200,
        pointing_of_a_telescope,
        "arcsec",
        False,
        10.0,
    ),
    Case(
        "expanding_bars",
        "How much steel expands per degree.",
        200,
        expanding_bars,
        "per mille",
        False,
        1.0,
    ),
    Case(
        "modulus_of_steel",
        "Young's modulus in pascal from deflections of beams.",
        120,
        modulus_of_steel,
        "per cent",
        False,
        1.0,
    ),
    Case(
        "frequency_of_the_mains",
        "The frequency of the mains to a few millihertz.",
        200,
        frequency_of_the_mains,
        "mHz",
        False,
        3.0,
    ),
    Case(
        "enzymes_by_michaelis",
        "Michaelis constants of two enzymes, in mol per litre.",
        200,
        enzymes_by_michaelis,
        "log",
        False,
        0.03,
    ),
    Case(
        "spam_by_pegasos",
        "A linear machine with a margin, at rates of one over the step.",
        600,
        spam_by_pegasos,
        "hinge",
        False,
        0.005,
    ),
    Case(
        "network_of_stations",
        "Places of stations in metres from distances between them.",
        250,
        network_of_stations,
        "cm",
        False,
        2.0,
    ),
    Case(
        "zero_points_of_nights",
        "Magnitudes' zero points of five nights.",
        200,
        zero_points_of_nights,
        "mmag",
        False,
        3.0,
    ),
)
