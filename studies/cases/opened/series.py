"""Time series: time stamps, seasons, filters, latent motion."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import cosine, draws, fixed, perceptron, rmse


class SeasonByYear(nn.Module):
    """A trend and two seasons, from a date such as 2023.37 (the year with its fraction)."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Linear(1, 8)
        self.head = perceptron(16, 32, 1, activation=nn.Tanh)
        with torch.no_grad():
            self.phases.weight.copy_(2 * math.pi * torch.arange(1, 9)[:, None] / 2)
            self.phases.bias.copy_(-2 * math.pi * torch.arange(1, 9) / 2 * 2020)

    def forward(self, year: Tensor) -> Tensor:
        angle = self.phases(year)
        demand: Tensor = self.head(torch.cat([angle.sin(), angle.cos()], -1))
        return demand


def _demand(since: Tensor) -> Tensor:
    return torch.sin(2 * math.pi * since) + 0.4 * torch.cos(4 * math.pi * since)


def demand_by_date(seed: int) -> Training:
    torch.manual_seed(seed)
    model = SeasonByYear()
    slow = [p for n, p in model.named_parameters() if not n.startswith("phases")]
    optimizer = torch.optim.Adam(slow, lr=1e-2)

    def loss(index: int) -> Tensor:
        since = 4 * torch.rand(64, 1, generator=draws(seed, index))
        return F.mse_loss(model(2020 + since), _demand(since))

    since = 4 * torch.rand(400, 1, generator=fixed(20))
    evaluate = rmse(model, 2020 + since, _demand(since))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 200))


class Hourly(nn.Module):
    """Load by hour, the hour counted since the records began and taken modulo inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2, 32, 1, activation=nn.Tanh)

    def forward(self, hour: Tensor) -> Tensor:
        angle = 2 * math.pi * (hour % 24) / 24
        load: Tensor = self.net(torch.cat([angle.sin(), angle.cos()], -1))
        return load


def load_by_hour(seed: int) -> Training:
    """The same kind of clock, but what is large never enters a product."""
    torch.manual_seed(seed)
    model = Hourly()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def truth(hour: Tensor) -> Tensor:
        return torch.sin(2 * math.pi * hour / 24) * torch.cos(2 * math.pi * hour / 12)

    def loss(index: int) -> Tensor:
        hour = torch.randint(400_000, (64, 1), generator=draws(seed, index)).float()
        return F.mse_loss(model(hour), truth(hour))

    hour = torch.randint(400_000, (400, 1), generator=fixed(21)).float()
    evaluate = rmse(model, hour, truth(hour))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


class Differences(nn.Module):
    """What a price does next, from the differences of its last days, taken by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.tensor([[[-1.0, 1.0]]]))
        self.kernel: Tensor
        self.net = perceptron(11, 32, 1)

    def forward(self, price: Tensor) -> Tensor:
        moves = F.conv1d(price[:, None], self.kernel)[:, 0]
        move: Tensor = self.net(moves)
        return move


def price_differences(seed: int) -> Training:
    """An index of some ten thousand points that swing back by what they moved."""
    torch.manual_seed(seed)
    model = Differences()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        start = 5000 + 20_000 * torch.rand(size, 1, generator=generator)
        phase = 9 * torch.rand(size, 1, generator=generator)
        height = 0.5 + torch.rand(size, 1, generator=generator)
        price = start + height * torch.sin(2 * math.pi * (torch.arange(13) + phase) / 9)
        return price[:, :12], price[:, 12:] - price[:, 11:12]

    def loss(index: int) -> Tensor:
        price, move = batch(draws(seed, index), 64)
        return F.mse_loss(model(price), move)

    evaluate = rmse(model, *batch(fixed(22), 400))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 3e-3, 250))


class LatentMotion(nn.Module):
    """Encode, move in many small Euler steps, decode."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.encode = nn.Linear(2, 8)
        self.move = perceptron(8, 16, 8, activation=nn.Tanh)
        self.decode = nn.Linear(8, 2)
        self.steps = steps

    def forward(self, start: Tensor) -> Tensor:
        state = self.encode(start)
        for _ in range(self.steps):
            state = state + self.move(state) / self.steps
        end: Tensor = self.decode(state)
        return end


def latent_motion(seed: int) -> Training:
    """Where a damped oscillator is, one second later."""
    torch.manual_seed(seed)
    model = LatentMotion(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    turn = torch.tensor([[math.cos(2.0), math.sin(2.0)], [-math.sin(2.0), math.cos(2.0)]]) * 0.8

    def loss(index: int) -> Tensor:
        start = torch.randn(64, 2, generator=draws(seed, index))
        return F.mse_loss(model(start), start @ turn.T)

    start = torch.randn(300, 2, generator=fixed(23))
    evaluate = rmse(model, start, start @ turn.T)
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 150))


def adaptive_filter(seed: int) -> Training:
    """Least mean squares: an echo is identified, sample by sample, by plain SGD."""
    torch.manual_seed(seed)
    echo = torch.randn(32, generator=fixed(24)) * torch.exp(-torch.arange(32) / 8)
    model = nn.Linear(32, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 32, generator=generator)
        noise = 0.02 * torch.randn(size, generator=generator)
        return x, (x @ echo + noise)[:, None]

    def loss(index: int) -> Tensor:
        x, y = batch(draws(seed, index), 4)
        return F.mse_loss(model(x), y)

    return Training(model, optimizer, loss, rmse(model, *batch(fixed(25), 500)))


class Forecast(nn.Module):
    """The next day from two weeks; the window is standardised with E[x²] - E[x]², in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Linear(14, 14, bias=False)
        self.net = perceptron(14, 32, 1)
        nn.init.eye_(self.smooth.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.smooth(x)
        mean = x.mean(1, keepdim=True)
        deviation = torch.sqrt((x * x).mean(1, keepdim=True) - mean * mean + 1e-5)
        forecast: Tensor = mean + deviation * self.net((x - mean) / deviation)
        return forecast


def forecast_one_pass_variance(seed: int) -> Training:
    """Levels near 100 that swing by 1."""
    torch.manual_seed(seed)
    model = Forecast()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        phase = 7 * torch.rand(size, 1, generator=generator)
        level = 60 + 100 * torch.rand(size, 1, generator=generator)
        wave = torch.sin(2 * math.pi * (torch.arange(15) + phase) / 7)
        return (level + wave)[:, :14], (level + wave)[:, 14:]

    def loss(index: int) -> Tensor:
        x, y = batch(draws(seed, index), 64)
        return F.mse_loss(model(x), y)

    return Training(
        model,
        optimizer,
        loss,
        rmse(model, *batch(fixed(27), 300)),
        schedule=cosine(optimizer, 1e-2, 250),
    )


CASES = (
    Case(
        "demand_by_date",
        "Seasons of a generated demand by the date as a fractional year, through a linear layer.",
        200,
        demand_by_date,
        "RMSE",
        False,
        0.1,
    ),
    Case(
        "load_by_hour",
        "A generated load by the hour since the records began, modulo a day.",
        300,
        load_by_hour,
        "RMSE",
        False,
        0.03,
    ),
    Case(
        "price_differences",
        "The next move of a generated index from its differences, which a convolution takes.",
        250,
        price_differences,
        "RMSE",
        False,
        0.1,
    ),
    Case(
        "latent_motion",
        "Euler steps in a latent space move a generated oscillator.",
        150,
        latent_motion,
        "RMSE",
        False,
        0.03,
    ),
    Case(
        "adaptive_filter",
        "A generated echo is identified by least mean squares at a low rate.",
        3000,
        adaptive_filter,
        "RMSE",
        False,
        0.01,
    ),
    Case(
        "forecast_one_pass_variance",
        "A generated weekly wave on levels of 60 to 160, standardised in one pass.",
        250,
        forecast_one_pass_variance,
        "RMSE",
        False,
        0.1,
    ),
)
