"""Powers, small steps, small differences."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from studies.exhibits.exhibit import Batch, Chain, Exhibit, normal, perceptron, teach


class LennardJones(nn.Module):
    """Pair energies 4·(r^-12 − r^-6) of learned distances, compared as logarithms."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        r = 0.3 + torch.sigmoid(out.squeeze(-1))
        energy = 4 * (r**-12 - r**-6)
        return (torch.asinh(energy) - y).abs().mean()


def molecules(g: torch.Generator) -> Batch:
    """Features and the asinh of an energy."""
    x = normal(g, 64, 16)
    r = 0.3 + torch.sigmoid(2 * teach(x)[:, 0])
    return x, torch.asinh(4 * (r**-12 - r**-6))


class SmallSteps(nn.Module):
    """Euler integration in 64 steps of 1e-4, from states near 8; the change is scaled up."""

    def __init__(self) -> None:
        super().__init__()
        self.field = perceptron(8, 32, 8)
        self.integrator = Integrator(1e-4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        push = self.field(x[:, :8])
        start = x[:, :8] + 8
        end = self.integrator(start, push)
        return cast("Tensor", ((end - start) * 100 - y).square().mean())


class Integrator(nn.Module):
    """Repeats x + dt · push 64 times."""

    def __init__(self, dt: float) -> None:
        super().__init__()
        self.dt = dt

    def forward(self, x: Tensor, push: Tensor) -> Tensor:
        """The state after 64 steps."""
        for _ in range(64):
            x = x + self.dt * push
        return x


def fields(g: torch.Generator) -> Batch:
    """States and the changes to learn."""
    x = normal(g, 64, 16)
    return x, torch.sin(x[:, :8]) * 0.64


class FiniteDifference(nn.Module):
    """A potential learned from its slope, a finite difference over 1e-4."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.slope = Slope()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        h = 1e-4
        step = torch.zeros_like(x)
        step[:, 0] = h
        slope = self.slope(self.potential(x + step), self.potential(x - step), h)
        return cast("Tensor", (slope.squeeze(-1) - y).square().mean())


class Slope(nn.Module):
    """(b − a) / 2h."""

    def forward(self, ahead: Tensor, behind: Tensor, h: float) -> Tensor:
        """The central difference quotient."""
        return (ahead - behind) / (2 * h)


def slopes(g: torch.Generator) -> Batch:
    """Positions and the slopes there."""
    x = normal(g, 64, 4)
    return x, torch.cos(x[:, 0]) + 0.5 * x[:, 1]


class FourthPower(nn.Module):
    """Radiation by the fourth power of a temperature in kelvins, learned from fluxes."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        kelvins = 300 + 30 * out.squeeze(-1)
        flux = 5.67e-8 * kelvins.pow(4)
        return ((flux - y) / 100).square().mean()


def skies(g: torch.Generator) -> Batch:
    """Features and a flux in W/m²."""
    x = normal(g, 64, 16)
    return x, 5.67e-8 * (300 + 30 * teach(x)[:, 0]).pow(4)


EXHIBITS = (
    Exhibit(
        "lennard_jones", "energies by the twelfth power",
        lambda: Chain(perceptron(16, 64, 1), LennardJones()), molecules,
    ),
    Exhibit(
        "fourth_power", "radiation by the fourth power of 300",
        lambda: Chain(perceptron(16, 64, 1), FourthPower()), skies, held_back=True,
    ),
    Exhibit("small_steps", "64 steps of 1e-4 from a state near 8", SmallSteps, fields),
    Exhibit(
        "finite_difference", "a slope over 1e-4", FiniteDifference, slopes, rate=1e-2, steps=150
    ),
)  # fmt: skip
