"""Physics: equations as losses, quantities in physical units."""

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


class Bar(nn.Module):
    """The displacement of a clamped bar under a load, u(0) = u(1) = 0 by construction."""

    def __init__(self, unit: float = 1.0) -> None:
        super().__init__()
        self.net = InUnits(perceptron(1, 32, 32, 1, activation=nn.Tanh), unit)

    def forward(self, x: Tensor) -> Tensor:
        u: Tensor = x * (1 - x) * self.net(2 * x - 1)
        return u


def _residual(u: Tensor, x: Tensor, height: float = 1.0) -> Tensor:
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return bend + height * math.pi**2 * torch.sin(math.pi * x)


def poisson_pinn(seed: int) -> Training:
    """u'' = -π² sin πx, whose solution is sin πx."""
    torch.manual_seed(seed)
    model = Bar()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(index: int) -> Tensor:
        x = torch.rand(64, 1, generator=draws(seed, index), requires_grad=True)
        return _residual(model(x), x).square().mean()

    x = torch.linspace(0, 1, 201)[:, None]
    evaluate = rmse(model, x, torch.sin(math.pi * x))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 250))


def bar_pinn_in_metres(seed: int) -> Training:
    """The same bar under a real load: it gives way by a tenth of a millimetre."""
    torch.manual_seed(seed)
    model = Bar(1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(index: int) -> Tensor:
        x = torch.rand(64, 1, generator=draws(seed, index), requires_grad=True)
        return _residual(model(x), x, 1e-4).square().mean()

    x = torch.linspace(0, 1, 201)[:, None]
    measure = rmse(model, x, 1e-4 * torch.sin(math.pi * x))

    def relative() -> float:
        return 1e4 * measure()

    return Training(model, optimizer, loss, relative, schedule=cosine(optimizer, 5e-3, 250))


class Stencil(nn.Module):
    """The residual of an oscillator by central differences, as old solvers write it."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.net = perceptron(1, 32, 32, 1, activation=nn.Tanh)
        self.step = step

    def position(self, t: Tensor) -> Tensor:
        y: Tensor = self.net(t)
        return y

    def forward(self, t: Tensor) -> Tensor:
        before, now, after = (self.position(t + d * self.step) for d in (-1, 0, 1))
        return (after - 2 * now + before) / self.step**2 + 4 * now


def oscillator_by_differences(seed: int) -> Training:
    """y'' = -4 y with y(0) = 1 and y'(0) = 0 is cos 2t."""
    torch.manual_seed(seed)
    model = Stencil(0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begin = torch.zeros(1, 1)

    def loss(index: int) -> Tensor:
        t = 2 * torch.rand(64, 1, generator=draws(seed, index))
        residual = model(t).square().mean()
        y, later = model.position(begin), model.position(begin + 0.05)
        speed = (later - y) / 0.05 + 0.1  # the difference's own error is y'' h / 2
        answer: Tensor = residual + 10 * ((y - 1).square() + speed.square()).sum()
        return answer

    t = torch.linspace(0, 2, 101)[:, None]
    evaluate = rmse(model.position, t, torch.cos(2 * t))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 500))


def _regression(
    model: nn.Module,
    truth: Callable[[Tensor], Tensor],
    inputs: int,
    seed: int,
    *,
    optimizer: torch.optim.Optimizer,
    batch: int = 128,
    schedule: Callable[[int], None] | None = None,
) -> Training:
    """A function of uniform inputs from -1 to 1, by its mean square error."""

    def loss(index: int) -> Tensor:
        x = 2 * torch.rand(batch, inputs, generator=draws(seed, index)) - 1
        return F.mse_loss(model(x), truth(x))

    x = 2 * torch.rand(500, inputs, generator=fixed(5)) - 1
    return Training(model, optimizer, loss, rmse(model, x, truth(x)), schedule=schedule)


class Barometer(nn.Module):
    """Air pressure in pascal: the network's answer is scaled back to where the air is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(3, 32, 1, activation=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        pressure: Tensor = 101_325 + 1500 * self.net(x)
        return pressure


def _weather(x: Tensor) -> Tensor:
    return 101_325 + 1000 * torch.sin(2 * x[:, :1]) + 600 * x[:, 1:2] * x[:, 2:3]


def pressure_in_pascal(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Barometer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return _regression(
        model, _weather, 3, seed, optimizer=optimizer, schedule=cosine(optimizer, 2e-2, 400)
    )


def temperature_in_kelvin(seed: int) -> Training:
    """The offset is learnt like everything else, from zero to 293."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = torch.tensor([[3.0, -2.0, 1.0, 0.5, 0.25, -1.5]])
    return _regression(
        model,
        lambda x: 293.15 + x @ weights.T,
        6,
        seed,
        optimizer=optimizer,
    )


def deflection_in_metres(seed: int) -> Training:
    """How far a beam bends: some millimetres, in metres."""
    torch.manual_seed(seed)
    model = InUnits(perceptron(3, 32, 1, activation=nn.Tanh), 1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return _regression(
        model,
        lambda x: 4e-3 * (x[:, :1] + torch.sin(2 * x[:, 1:2]) * x[:, 2:3]),
        3,
        seed,
        optimizer=optimizer,
        batch=256,
        schedule=cosine(optimizer, 1e-2, 300),
    )


class Pendulum(nn.Module):
    """Energy [B, 1] of a state [B, 2], learnt through the motion it makes (a Hamiltonian net)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = perceptron(2, 48, 1, activation=nn.Tanh)

    def forward(self, state: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


def hamiltonian_pendulum(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Pendulum()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def truth(state: Tensor) -> Tensor:
        return torch.stack([state[:, 1], -torch.sin(state[:, 0])], 1)

    def loss(index: int) -> Tensor:
        state = 4 * torch.rand(64, 2, generator=draws(seed, index)) - 2
        return F.mse_loss(model(state.requires_grad_()), truth(state.detach()))

    def evaluate() -> float:
        state = 4 * torch.rand(400, 2, generator=fixed(6)) - 2
        with torch.enable_grad():
            moved = model(state.requires_grad_())
        return float((moved - truth(state)).square().mean().sqrt())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 400))


CASES = (
    Case(
        "poisson_pinn",
        "A network solves Poisson's equation on an interval by its residual.",
        250,
        poisson_pinn,
        "RMSE",
        False,
        0.005,
    ),
    Case(
        "bar_pinn_in_metres",
        "A network finds how far a loaded bar gives way, in metres, by the equation's residual.",
        250,
        bar_pinn_in_metres,
        "RMSE in tenths of a millimetre",
        False,
        0.02,
    ),
    Case(
        "oscillator_by_differences",
        "A network solves an oscillator whose second derivative is a difference of its outputs.",
        500,
        oscillator_by_differences,
        "RMSE",
        False,
        0.01,
    ),
    Case(
        "pressure_in_pascal",
        "Air pressure, generated, in pascal, scaled back inside the model.",
        400,
        pressure_in_pascal,
        "RMSE in Pa",
        False,
        60.0,
    ),
    Case(
        "temperature_in_kelvin",
        "Room temperature in kelvin from six generated sensors, by linear regression.",
        400,
        temperature_in_kelvin,
        "RMSE in K",
        False,
        0.1,
    ),
    Case(
        "deflection_in_metres",
        "The bend of a beam, generated, of some millimetres in metres.",
        300,
        deflection_in_metres,
        "RMSE in m",
        False,
        2e-4,
    ),
    Case(
        "hamiltonian_pendulum",
        "The energy of a pendulum, learnt from its motion, generated.",
        400,
        hamiltonian_pendulum,
        "RMSE",
        False,
        0.05,
    ),
)
