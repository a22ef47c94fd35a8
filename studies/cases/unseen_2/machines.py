"""Machines, circuits, satellites and buildings: a law of physics stands between network and loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    cosine,
    mlp,
    product,
    relative_rmse,
    rng,
    supervised,
)


class Grid(nn.Module):
    """Voltages of a grid's nodes from what is fed in at each; conductances are per unit."""

    def __init__(self, conductance: Tensor) -> None:
        super().__init__()
        self.register_buffer("conductance", conductance)
        self.body = mlp(16, 48, 16, act=nn.Tanh)

    def voltages(self, fed: Tensor) -> Tensor:
        return 1 + 3e-4 * self.body(fed).float()

    def forward(self, fed: Tensor) -> Tensor:
        v = self.voltages(fed)
        return v * (v @ self.conductance)


def grid_state(seed: int) -> Training:
    """Kirchhoff's laws are the loss: what voltages would feed in as measured."""
    torch.manual_seed(seed)
    g = rng(31)
    near = (torch.rand(16, 16, generator=g) < 0.2).float().triu(1)
    near += torch.diag(torch.ones(15), 1)
    line = near.clamp(max=1) * (300 + 900 * torch.rand(16, 16, generator=g))
    line = line + line.T
    conductance = torch.diag(line.sum(-1) + 50) - line
    model = Grid(conductance)

    def states(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        v = 1 + 3e-4 * torch.randn(n, 16, generator=g)
        return v * product(v, conductance) - 50, v

    held, wanted = states(800, rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        fed, _ = states(64, rng(seed, step))
        return F.mse_loss(model(fed) - 50, fed)

    def evaluate() -> float:
        return relative_rmse(model.voltages(held), wanted)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 300))


class Orbit(nn.Module):
    """Corrections of predicted orbits, turned from the sky to the rotating earth; in kilometres."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 24, 3, act=nn.Tanh)

    def correction(self, state: Tensor) -> Tensor:
        return 0.01 * self.body(state)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, predicted, turn = batch
        place = predicted + self.correction(state)
        return (turn @ place[..., None]).squeeze(-1)


def navigation_satellites(seed: int) -> Training:
    """Predicted orbits are wrong by some metres; stations on the ground see it."""
    torch.manual_seed(seed)
    model = Orbit()
    effect = torch.randn(4, 3, generator=rng(32))

    def passes(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        state = torch.randn(n, 4, generator=g)
        way = 6.2832 * torch.rand(n, generator=g)
        flat = torch.stack([way.cos(), 0.57 * way.sin(), 0.82 * way.sin()], -1)
        predicted = 26_560 * flat
        off = 0.01 * torch.tanh(product(state, effect))
        angle = 6.2832 * torch.rand(n, generator=g)
        c, s, o = angle.cos(), angle.sin(), torch.zeros(n)
        turn = torch.stack([c, s, o, -s, c, o, o, o, o + 1], -1).view(n, 3, 3)
        seen = (turn.double() * (predicted + off).double()[:, None]).sum(-1)
        return (state, predicted, turn), seen.float()

    batch, _ = passes(1000, rng(TEST))
    wanted = 0.01 * torch.tanh(product(batch[0], effect))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        batch, seen = passes(128, rng(seed, step))
        return F.mse_loss(model(batch), seen)

    def evaluate() -> float:
        return relative_rmse(model.correction(batch[0]), wanted)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 200))


class Lens(nn.Module):
    """Directions of stars from their places on a camera's sensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Parameter(torch.zeros(4))

    def forward(self, spot: Tensor) -> Tensor:
        r = spot.square().sum(-1, keepdim=True)
        shift = self.bend[0] * r + self.bend[1] * r * r + self.bend[2:] * r
        ray = torch.cat([spot * (1 + shift), torch.ones_like(r)], -1)
        return ray / (ray * ray).sum(-1, keepdim=True).sqrt()


def star_tracker(seed: int) -> Training:
    """A lens is calibrated by the angles between the stars of a picture; the field is narrow."""
    torch.manual_seed(seed)
    model, real = Lens(), Lens()
    with torch.no_grad():
        real.bend.copy_(torch.tensor([0.25, -0.1, 0.1, -0.05]))

    def angles(lens: Lens, spot: Tensor) -> Tensor:
        ray = lens(spot * torch.tensor([1.0, 1.0]))
        ray = torch.cat([0.03 * ray[..., :2] / ray[..., 2:], torch.ones(*ray.shape[:-1], 1)], -1)
        ray = F.normalize(ray, dim=-1)
        near = ray @ ray.transpose(1, 2)
        i, j = torch.triu_indices(6, 6, 1)
        return torch.acos(near[:, i, j].clamp(-1 + 1e-7, 1 - 1e-7))

    def true_angles(spot: Tensor) -> Tensor:
        ray = real(spot)
        flat = 0.03 * (ray[..., :2] / ray[..., 2:]).double()
        ray = F.normalize(torch.cat([flat, torch.ones(*flat.shape[:-1], 1)], -1), dim=-1)
        i, j = torch.triu_indices(6, 6, 1)
        apart = (ray[:, i] - ray[:, j]).norm(dim=-1)
        return (2 * torch.asin(apart / 2)).float()

    def loss(step: int) -> Tensor:
        spot = 2 * torch.rand(24, 6, 2, generator=rng(seed, step)) - 1
        with torch.no_grad():
            wanted = true_angles(spot)
        return 1e4 * F.mse_loss(angles(model, spot), wanted)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def evaluate() -> float:
        spot = 2 * torch.rand(500, 6, 2, generator=rng(TEST)) - 1
        return float((model(spot) - real(spot)).norm(dim=-1).mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 250))


class Bridge(nn.Module):
    """Where a bridge's joints move under load, in metres, and what its bars bear."""

    def __init__(self, joints: Tensor, bars: Tensor) -> None:
        super().__init__()
        self.register_buffer("joints", joints)
        links = torch.zeros(len(bars), len(joints))
        links[torch.arange(len(bars)), bars[:, 0]] = 1
        links[torch.arange(len(bars)), bars[:, 1]] = -1
        self.register_buffer("links", links)
        self.body = mlp(8, 32, 2 * len(joints), act=nn.Tanh)

    def moves(self, load: Tensor) -> Tensor:
        return 1e-3 * self.body(load).view(len(load), -1, 2)

    def forces(self, moves: Tensor) -> Tensor:
        """In kilonewton, from moves (n, joints, 2)."""
        span = (self.links @ (self.joints + moves)).float()
        bars = self.links @ self.joints
        rest = bars.float().square().sum(-1).sqrt()
        return 1e4 * (span.square().sum(-1).sqrt() - rest)

    def forward(self, load: Tensor) -> Tensor:
        return self.forces(self.moves(load))


def bars_of_a_bridge(seed: int) -> Training:
    """Strain gauges say what each bar bears; how do the joints move?"""
    torch.manual_seed(seed)
    x = torch.arange(5.0) * 12
    joints = torch.cat([torch.stack([x, 0 * x], -1), torch.stack([x + 6, 0 * x + 8], -1)])
    bars = [(i, i + 1) for i in range(4)] + [(5 + i, 6 + i) for i in range(4)]
    bars += [(i, 5 + i) for i in range(5)] + [(i + 1, 5 + i) for i in range(4)]
    model = Bridge(joints, torch.tensor(bars))
    effect = 0.4 * torch.randn(8, 20, generator=rng(33))

    def loads(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        load = torch.randn(n, 8, generator=g)
        moves = 1e-3 * torch.tanh(product(load, effect)).view(n, 10, 2)
        ends = torch.tensor(bars)
        place = (joints + moves).double()
        span = (place[:, ends[:, 0]] - place[:, ends[:, 1]]).norm(dim=-1)
        rest = (joints[ends[:, 0]] - joints[ends[:, 1]]).double().norm(dim=-1)
        return load, (1e4 * (span - rest)).float()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(
        model, optimizer, seed, loads, F.mse_loss, relative_rmse, 64, 500,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


class Ladder(nn.Module):
    """A ladder of resistors and capacitors in ohms and farads, simulated in steps of 50 ns."""

    def __init__(self) -> None:
        super().__init__()
        self.log_ohms = nn.Parameter(torch.full((5,), 7.6))
        self.log_farads = nn.Parameter(torch.full((5,), -20.7))

    def forward(self, drive: Tensor) -> Tensor:
        flow = torch.exp(-self.log_ohms)
        lower = torch.diag(-flow) + torch.diag(flow[1:], -1)
        lower = lower + torch.diag(torch.cat([-flow[1:], torch.zeros(1)])) + torch.diag(flow[1:], 1)
        rates = lower * torch.exp(-self.log_farads)[:, None]
        into = flow[0] * torch.exp(-self.log_farads[0])
        first = torch.tensor([1.0, 0, 0, 0, 0])
        v, seen = torch.zeros(len(drive), 5), []
        for u in drive.unbind(-1):
            v = v + 5e-8 * (v @ rates.T + u[:, None] * into * first)
            seen.append(v)
        return torch.stack(seen, 1)


def ladder_of_capacitors(seed: int) -> Training:
    """Parts of a circuit by its response to steps at its input."""
    torch.manual_seed(seed)
    model, real = Ladder(), Ladder()
    g = rng(34)
    with torch.no_grad():
        real.log_ohms.add_(0.5 * torch.randn(5, generator=g))
        real.log_farads.add_(0.3 * torch.randn(5, generator=g))

    def drives(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        drive = torch.randn(n, 4, generator=g).repeat_interleave(6, 1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return drive, real(drive)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return supervised(model, optimizer, seed, drives, F.mse_loss, relative_rmse, 16, 200)


class Inertial(nn.Module):
    """A filter's covariance of place (m), speed (m/s), tilt (rad) and gyroscope drift (rad/s)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_noise = nn.Parameter(torch.tensor([-5.0, -24.0]))

    def forward(self) -> Tensor:
        """Variances of the innovations of twelve fixes, one every fifteen seconds."""
        dt, fall = 15.0, 9.81
        move = torch.eye(4) + torch.tensor(
            [
                [0, dt, 0.5 * fall * dt**2, fall * dt**3 / 6],
                [0, 0, fall * dt, 0.5 * fall * dt**2],
                [0, 0, 0, dt],
                [0, 0, 0, 0],
            ]
        )
        noise = torch.cat([torch.zeros(1), self.log_noise[:1].exp(), torch.zeros(2)])
        noise = noise + torch.cat([torch.zeros(3), self.log_noise[1:].exp()])
        cover = torch.diag(torch.tensor([25.0, 0.1, 1e-8, 1e-13]))
        found = []
        for _ in range(12):
            cover = (move @ cover @ move.T).float() + torch.diag(noise)
            spread = cover[0, 0] + 4.0
            found.append(spread)
            cover = cover - cover[:, :1] * cover[:1] / spread
        return torch.stack(found)


def drift_of_a_gyroscope(seed: int) -> Training:
    """How much the accelerometer errs and the gyroscope drifts, by a filter's innovations."""
    torch.manual_seed(seed)
    model, real = Inertial(), Inertial()
    with torch.no_grad():
        real.log_noise.copy_(torch.tensor([-3.0, -21.5]))
        spread = real()

    def loss(step: int) -> Tensor:
        seen = spread.sqrt() * torch.randn(2000, 12, generator=rng(seed, step))
        said = model()
        return (0.5 * seen.square() / said + 0.5 * said.log()).mean()

    def evaluate() -> float:
        return float((model.log_noise - real.log_noise).abs().mean())

    optimizer = torch.optim.Adam([model.log_noise], lr=1e-1)
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 120))


CASES = (
    Case(
        "grid_state",
        "Voltages of a power grid, with Kirchhoff's laws in the loss.",
        300,
        grid_state,
        "relative",
        False,
        0.1,
    ),
    Case(
        "navigation_satellites",
        "Corrections of satellites' orbits, seen from the turning earth.",
        200,
        navigation_satellites,
        "relative RMSE",
        False,
        0.2,
    ),
    Case(
        "star_tracker",
        "A narrow lens is calibrated by angles between stars.",
        250,
        star_tracker,
        "bend",
        False,
        0.02,
    ),
    Case(
        "bars_of_a_bridge",
        "Moves of a bridge's joints from strains of its bars.",
        200,
        bars_of_a_bridge,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "ladder_of_capacitors",
        "Ohms and farads of a ladder circuit from its responses.",
        80,
        ladder_of_capacitors,
        "relative",
        False,
        0.05,
    ),
    Case(
        "drift_of_a_gyroscope",
        "Noises of an inertial unit by a Kalman filter's innovations.",
        120,
        drift_of_a_gyroscope,
        "log",
        False,
        0.3,
    ),
)
