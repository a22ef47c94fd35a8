"""Regression in the units that people measure in: large offsets, small quantities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import InUnits, cosine, draws, fixed, perceptron, rmse

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[Tensor, Tensor]


def _relative_error(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """The root mean square error over the targets' standard deviation, in evaluation mode."""
    measure = rmse(model, x, y)

    def evaluate() -> float:
        model.eval()
        return measure() / float(y.std())

    return evaluate


def _fit(
    model: nn.Module,
    batch: Callable[[torch.Generator, int], Batch],
    seed: int,
    *,
    optimizer: torch.optim.Optimizer,
    size: int,
    schedule: Callable[[int], None],
) -> Training:
    """By the mean square error, on batches that a generator makes."""

    def loss(index: int) -> Tensor:
        x, y = batch(draws(seed, index), size)
        return F.mse_loss(model(x), y)

    evaluate = _relative_error(model, *batch(fixed(100), 1000))
    return Training(model, optimizer, loss, evaluate, schedule=schedule)


def returns_of_stocks(seed: int) -> Training:
    """Daily returns of about a per mille, from factors."""
    torch.manual_seed(seed)
    model = InUnits(perceptron(8, 32, 1, activation=nn.Tanh), 1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batch(generator: torch.Generator, size: int) -> Batch:
        x = torch.randn(size, 8, generator=generator)
        signal = torch.tanh(x[:, :1]) + 0.5 * x[:, 1:2] * torch.sigmoid(x[:, 2:3])
        noise = 0.2 * torch.randn(size, 1, generator=generator)
        return x, 1e-3 * (signal + noise)

    return _fit(
        model, batch, seed, optimizer=optimizer, size=512, schedule=cosine(optimizer, 1e-2, 300)
    )


def concentrations(seed: int) -> Training:
    """Three products of a reaction, in moles a litre, by temperature, acidity and time."""
    torch.manual_seed(seed)
    model = InUnits(perceptron(3, 48, 3, activation=nn.SiLU), 1e-3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def batch(generator: torch.Generator, size: int) -> Batch:
        x = 2 * torch.rand(size, 3, generator=generator) - 1
        rate = torch.sigmoid(2 * x[:, :1] + x[:, 1:2])
        left = torch.exp(-(1 + x[:, 2:]) * rate)
        return x, 5e-4 * torch.cat([left, 1 - left, rate * left], 1)

    return _fit(
        model, batch, seed, optimizer=optimizer, size=256, schedule=cosine(optimizer, 5e-3, 400)
    )


class Dipoles(nn.Module):
    """A dipole from partial charges, which a network gives to four atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.charge = InUnits(perceptron(3, 32, 1, activation=nn.SiLU), 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        charge = self.charge(x[..., 3:])
        answer: Tensor = (charge * x[..., :3]).sum(1)
        return answer


def dipoles_of_molecules(seed: int) -> Training:
    """Charges of about a thousandth, as of weakly polar bonds; places in ångström."""
    torch.manual_seed(seed)
    model = Dipoles()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> Batch:
        place = torch.randn(size, 4, 3, generator=generator)
        kind = torch.rand(size, 4, 3, generator=generator)
        charge = 1e-3 * torch.sin(4 * kind[..., :1] - 2 * kind[..., 1:2])
        return torch.cat([place, kind], 2), (charge * place).sum(1)

    return _fit(
        model, batch, seed, optimizer=optimizer, size=128, schedule=cosine(optimizer, 1e-2, 300)
    )


def small_rewards(seed: int) -> Training:
    """Values of a trader's states, in shares of the account: a step earns about a per mille."""
    torch.manual_seed(seed)
    model = InUnits(perceptron(4, 48, 2), 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def batch(generator: torch.Generator, size: int) -> Batch:
        x = torch.randn(size, 4, generator=generator)
        edge = torch.tanh(x[:, :1] - x[:, 1:2]) + 0.3 * x[:, 2:3]
        return x, 1e-3 * torch.cat([edge, -edge + 0.2 * x[:, 3:]], 1)

    return _fit(
        model, batch, seed, optimizer=optimizer, size=256, schedule=cosine(optimizer, 1e-2, 400)
    )


class Cleaner(nn.Module):
    """A sound [B, T] without its noise, by two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 16, 15, padding=7, bias=False)
        self.last = nn.Conv1d(16, 1, 15, padding=7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        clean: Tensor = self.last(F.relu(self.first(x[:, None])))[:, 0]
        return clean


def quiet_sound_cleaned(seed: int) -> Training:
    """A far voice: its amplitude is two ten thousandths of full scale."""
    torch.manual_seed(seed)
    model = Cleaner()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> Batch:
        pitch = 0.1 + 0.3 * torch.rand(size, 1, generator=generator)
        phase = 2 * math.pi * torch.rand(size, 1, generator=generator)
        voice = torch.sin(pitch * torch.arange(96) + phase)
        noise = 0.7 * torch.randn(size, 96, generator=generator)
        return 2e-4 * (voice + noise), 2e-4 * voice

    return _fit(
        model, batch, seed, optimizer=optimizer, size=48, schedule=cosine(optimizer, 1e-2, 200)
    )


class Calendar(nn.Module):
    """Year and age as they are written; batch norm brings them to a common scale afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 32), nn.BatchNorm1d(32)
        self.second = perceptron(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        wage: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return wage


def wages_by_year(seed: int) -> Training:
    """Logarithms of wages by year, from 1998 to 2022, and age; the year 2008 was a bad one."""
    torch.manual_seed(seed)
    model = Calendar()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> Batch:
        year = torch.randint(1998, 2023, (size, 1), generator=generator).float()
        age = torch.randint(18, 66, (size, 1), generator=generator).float()
        rise = (year - 2010) / 12 - 0.8 * torch.exp(-((year - 2010) ** 2) / 18)
        return torch.cat([year, age], 1), rise - ((age - 48) / 30) ** 2

    return _fit(
        model, batch, seed, optimizer=optimizer, size=256, schedule=cosine(optimizer, 2e-2, 400)
    )


def reaction_by_kelvin(seed: int) -> Training:
    """The logarithm of a reaction's rate by kelvin and bar, with a peak where an enzyme works."""
    torch.manual_seed(seed)
    model = Calendar()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> Batch:
        kelvin = 300 + 8 * torch.rand(size, 1, generator=generator)
        bar = 1 + 4 * torch.rand(size, 1, generator=generator)
        rate = 2 * torch.exp(-((kelvin - 305) ** 2) / 4) + 0.2 * bar
        return torch.cat([kelvin, bar], 1), rate

    return _fit(
        model, batch, seed, optimizer=optimizer, size=256, schedule=cosine(optimizer, 2e-2, 400)
    )


class Spring(nn.Module):
    """The force of a damped spring, whose stiffness and damping are the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stiffness = nn.Parameter(torch.tensor(200.0))
        self.damping = nn.Parameter(torch.tensor(40.0))

    def forward(self, x: Tensor) -> Tensor:
        return -self.stiffness * x[:, :1] - self.damping * x[:, 1:]


def spring_identified(seed: int) -> Training:
    """From 200 N/m to the true 240, gently, for measured forces are noisy."""
    torch.manual_seed(seed)
    model = Spring()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def batch(generator: torch.Generator, size: int) -> Batch:
        x = torch.randn(size, 2, generator=generator) * torch.tensor([0.1, 0.5])
        force = -240 * x[:, :1] - 25 * x[:, 1:]
        return x, force + 0.5 * torch.randn(size, 1, generator=generator)

    return _fit(
        model, batch, seed, optimizer=optimizer, size=32, schedule=cosine(optimizer, 0.04, 2500)
    )


CASES = (
    Case(
        "returns_of_stocks",
        "Generated daily returns of stocks, as they are, from eight factors.",
        300,
        returns_of_stocks,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "concentrations",
        "Generated concentrations in moles a litre, by RMSprop.",
        400,
        concentrations,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "dipoles_of_molecules",
        "Generated dipoles of weakly polar molecules, from charges that a network gives.",
        300,
        dipoles_of_molecules,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "small_rewards",
        "Values of two actions, generated, in shares of an account.",
        400,
        small_rewards,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "quiet_sound_cleaned",
        "Noise is taken from a generated, quiet sound.",
        200,
        quiet_sound_cleaned,
        "relative error",
        False,
        0.03,
    ),
    Case(
        "wages_by_year",
        "Generated wages by year and age as they are written, batch norm behind the first layer.",
        400,
        wages_by_year,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "reaction_by_kelvin",
        "A generated rate by temperature in kelvin, batch norm behind the first layer.",
        400,
        reaction_by_kelvin,
        "relative error",
        False,
        0.06,
    ),
    Case(
        "spring_identified",
        "The stiffness of a generated spring in newton a metre.",
        2500,
        spring_identified,
        "relative error",
        False,
        0.02,
    ),
)
