"""Trainings through many small steps: what rounds off in each of them adds up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import TEST, cosine, generator, mlp


class Cohorts(nn.Module):
    """Eight age groups of ten years, month by month: who dies, who moves on to the next group."""

    MONTHS, AGEING = 120, 1 / 120

    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.full((8,), 2e-3).log())

    def forward(self, people: Tensor) -> Tensor:
        return self.after(people, self.log_rate)

    @classmethod
    def month(cls, log_rate: Tensor) -> Tensor:
        moves = torch.tensor([cls.AGEING] * 7 + [0.0])
        stay = 1 - log_rate.exp() - moves
        return torch.diag(stay) + torch.diag(moves[:-1], 1)

    @classmethod
    def after(cls, people: Tensor, log_rate: Tensor) -> Tensor:
        month = cls.month(log_rate)
        for _ in range(cls.MONTHS):
            people = people @ month
        return people


def monthly_deaths(seed: int) -> Training:
    """A demographer's: monthly death rates from two censuses, ten years apart, of many regions."""
    torch.manual_seed(seed)
    model = Cohorts()
    true = torch.linspace(-7.6, -4.6, 8)
    people = 0.2 + torch.rand(400, 8, generator=generator(seed))
    later = Cohorts.after(people.double(), true.double()).float()
    later = later * (1 + 2e-4 * torch.randn(later.shape, generator=generator(seed, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 400, (64,), generator=generator(seed, step))
        return (torch.log(model(people[rows])) - torch.log(later[rows])).square().mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.log_rate - true).abs().mean()),
        schedule=cosine(optimizer, 150),
    )


def skew(v: Tensor) -> Tensor:
    """The matrices of cross products with vectors (..., 3)."""
    x, y, z = v.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).unflatten(-1, (3, 3))


class Gyroscope(nn.Module):
    """Attitude by the product of a rotation each millisecond; rates are radians a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.gain = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, start: Tensor, rates: Tensor) -> Tensor:
        turns = torch.linalg.matrix_exp(skew(rates * (1 + self.gain) + 1e-4 * self.bias))
        attitude = start
        for turn in turns.unbind(1):
            attitude = torch.bmm(attitude, turn)
        return attitude


def gyroscope_between_pictures(seed: int) -> Training:
    """Somebody's who calibrates a phone's gyroscope (1 kHz) by the camera's attitude, 120 ms apart."""
    torch.manual_seed(seed)
    model, count = Gyroscope(), 96
    bias, gain = torch.tensor([0.6, -0.4, 0.3]), torch.tensor([0.01, -0.02, 0.015])
    g = generator(seed)
    start = torch.linalg.matrix_exp(skew(2 * torch.randn(count, 3, generator=g)).double())
    steady, swing = 3e-4 * torch.randn(2, count, 1, 3, generator=g)
    rates = steady + swing * torch.sin(torch.linspace(0, 3, 120))[:, None]
    turns = torch.linalg.matrix_exp(skew(rates * (1 + gain) + 1e-4 * bias).double())
    seen = start
    for turn in turns.unbind(1):
        seen = seen @ turn
    start, seen = start.float(), seen.float()
    optimizer = torch.optim.Adam(
        [{"params": [model.bias], "lr": 5e-2}, {"params": [model.gain], "lr": 2e-3}]
    )

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, count, (24,), generator=generator(seed, step + 1))
        return 1e4 * F.mse_loss(model(start[rows], rates[rows]), seen[rows])

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.bias - bias).abs().mean()),
        schedule=cosine(optimizer, 60),
    )


class Relaxation(nn.Module):
    """Twenty steps of a solver, x + w (b - A x), each with a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_width = nn.Parameter(torch.linspace(0.0, 1.5, 20))
        place = torch.arange(32)
        apart = (place[:, None] - place).abs()
        system = 0.55 * (apart == 0).float() - 0.25 * (apart == 1).float()
        self.register_buffer("system", system)

    def forward(self, b: Tensor) -> Tensor:
        x = torch.zeros_like(b)
        for width in self.log_width.exp():
            x = x + width * (b - x @ self.system)
        return b - x @ self.system


def widths_of_a_solver(seed: int) -> Training:
    """A numerical analyst's: step widths that leave the smallest residual of a screened problem."""
    torch.manual_seed(seed)
    model = Relaxation()

    def share_left(g: torch.Generator, count: int) -> Tensor:
        b = torch.randn(count, 32, generator=g)
        return model(b).square().sum(-1) / b.square().sum(-1)

    def loss(step: int) -> Tensor:
        return torch.log10(share_left(generator(seed, step), 32)).mean()

    def evaluate() -> float:
        return float(torch.log10(share_left(generator(TEST), 500)).mean()) / 2

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 300))


class Recursive(nn.Module):
    """Learnt features and weights that recursive least squares finds sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(3, 16, 6, activation=nn.Tanh)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Errors of the forecasts (n, time); x (n, time, 3), y (n, time)."""
        n, forget = len(x), 0.98
        spread = 1e4 * torch.eye(6).expand(n, 6, 6)
        weights = torch.zeros(n, 6)
        errors = []
        for f, target in zip(self.features(x).unbind(1), y.unbind(1), strict=True):
            seen = torch.bmm(spread, f[..., None]).squeeze(-1)
            gain = seen / (forget + (f * seen).sum(-1, keepdim=True))
            error = target - (f * weights).sum(-1)
            weights = weights + gain * error[:, None]
            spread = (spread - gain[..., None] * seen[:, None]) / forget
            errors.append(error)
        return torch.stack(errors, 1)


def machine_tool(seed: int) -> Training:
    """An engineer's: features for an adaptive model of a tool, that meets another tool each time."""
    torch.manual_seed(seed)
    model = Recursive()

    def tools(g: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 40, 3, generator=g) * 2 - 1
        a, b, c = torch.randn(3, count, 1, generator=g)
        u, v, w = x.unbind(-1)
        return x, a * torch.sin(2 * u) + b * v * w + c * (w * w - 0.3)

    def errors(g: torch.Generator, count: int) -> Tensor:
        return model(*tools(g, count))[:, 12:]

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model,
        optimizer,
        lambda step: F.smooth_l1_loss(
            (e := errors(generator(seed, step), 24)), torch.zeros_like(e)
        ),
        lambda: float(errors(generator(TEST), 300).abs().mean()),
        clip_norm=1.0,
    )


class Driver(nn.Module):
    """Gains of somebody who holds a lane, by Riccati's recursion from what deviations cost him."""

    def __init__(self) -> None:
        super().__init__()
        self.log_cost = nn.Parameter(torch.zeros(2))

    def forward(self, speed: Tensor) -> Tensor:
        """Gains (n, 2) at speeds (n,) in tens of metres a second."""
        return gains(self.log_cost.exp(), speed, 60)


def gains(cost: Tensor, speed: Tensor, steps: int) -> Tensor:
    dt = 0.02
    one, none = torch.ones_like(speed), torch.zeros_like(speed)
    moves = torch.stack(  # the state (offset, heading) and the steering, after dt
        [one, 10 * dt * speed, 5 * dt * dt * speed**2, none, one, dt * speed], -1
    ).unflatten(-1, (2, 3))
    price = torch.diag(cost).expand(len(speed), 2, 2)
    for _ in range(steps):
        m = torch.bmm(moves.transpose(1, 2), torch.bmm(price, moves))
        gain = m[:, 2:, :2] / (1 + m[:, 2:, 2:])
        price = torch.diag(cost) + m[:, :2, :2] - m[:, :2, 2:] * gain
    return gain.squeeze(1)


def costs_of_a_driver(seed: int) -> Training:
    """A car maker's: what a driver minds, offset or heading, by how he steers at many speeds."""
    torch.manual_seed(seed)
    model, true = Driver(), torch.tensor([-1.0, 1.5])
    true = true + 0.2 * torch.randn(2, generator=generator(seed))
    speeds = torch.linspace(0.8, 3.5, 64)
    seen = gains(true.double().exp(), speeds.double(), 60).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 64, (16,), generator=generator(seed, step + 1))
        return (model(speeds[rows]) / seen[rows] - 1).square().mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.log_cost - true).abs().mean()),
        schedule=cosine(optimizer, 90),
    )


CASES = (
    Case("monthly_deaths", "Months.", 150, monthly_deaths, "log error of rates", False, 0.05),
    Case(
        "gyroscope_between_pictures",
        "Rotations.",
        60,
        gyroscope_between_pictures,
        "error of the bias (0.1 rad/s)",
        False,
        0.03,
    ),
    Case("widths_of_a_solver", "A solver.", 300, widths_of_a_solver, "log10 residual", False, 0.2),
    Case("machine_tool", "Recursion.", 60, machine_tool, "mean absolute error", False, 0.02),
    Case("costs_of_a_driver", "Riccati.", 90, costs_of_a_driver, "log error of costs", False, 0.1),
)
