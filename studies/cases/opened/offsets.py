"""Quantities that lie far from zero: places, times, altitudes, detectors with a pedestal."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, cosine, draws, fitted, fixed, perceptron


class Folded(nn.Module):
    """A network whose inputs are standardised by a linear layer, as exported models have it."""

    def __init__(self, middle: list[float], unit: list[float]) -> None:
        super().__init__()
        self.scale = nn.Linear(len(middle), len(middle))
        with torch.no_grad():
            self.scale.weight.copy_(torch.diag(1 / torch.tensor(unit)))
            self.scale.bias.copy_(-torch.tensor(middle) / torch.tensor(unit))
        self.scale.requires_grad_(requires_grad=False)
        self.net = perceptron(len(middle), 48, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net(self.scale(x))
        return answer


class FromOrigin(nn.Module):
    """The same network, but what is subtracted and divided by is not folded into a layer."""

    def __init__(self, middle: float, unit: float) -> None:
        super().__init__()
        self.middle, self.unit = middle, unit
        self.net = perceptron(1, 48, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net((x - self.middle) / self.unit)
        return answer


def fares_by_coordinates(seed: int) -> Training:
    """Fares of taxis by the degrees of where a ride begins and ends, all within one city."""
    torch.manual_seed(seed)
    middle = [-73.98, 40.75, -73.98, 40.75]
    model = Folded(middle, [0.012] * 4)
    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        place = 2 * torch.rand(size, 4, generator=generator) - 1
        east, north = place[:, 2:3] - place[:, :1], place[:, 3:] - place[:, 1:2]
        fare = 0.5 * torch.sqrt(east**2 + 2 * north**2) + 0.3 * place[:, 1:2]
        return torch.tensor(middle) + 0.02 * place, fare

    return fitted(model, batch, seed, optimizer=optimizer, size=256, steps=300, peak=1e-2)


def _sales(model: Folded | FromOrigin, seed: int) -> Training:
    """Two years of sales by the hour of a computer's clock, with one season a year."""
    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        hour = torch.randint(17_520, (size, 1), generator=generator).float()
        sales = torch.sin(2 * math.pi * hour / 8760) + hour / 17_520
        return 455_832 + hour, sales

    return fitted(model, batch, seed, optimizer=optimizer, size=256, steps=300, peak=1e-2)


def sales_by_hours_since_1970(seed: int) -> Training:
    torch.manual_seed(seed)
    return _sales(Folded([464_592.0], [5000.0]), seed)


def sales_by_hours_of_the_record(seed: int) -> Training:
    torch.manual_seed(seed)
    return _sales(FromOrigin(464_592, 5000), seed)


class AfterNorm(nn.Module):
    """Raw columns into a linear layer; batch norm brings what it answers to a common scale."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, width), nn.BatchNorm1d(width)
        self.rest = perceptron(width, 32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.rest(torch.tanh(self.norm(self.first(x))))
        return answer


def pulses_on_a_pedestal(seed: int) -> Training:
    """Which of eight times a pulse of ten counts has, on a detector's pedestal of 16,000."""
    torch.manual_seed(seed)
    model = AfterNorm(32, 48, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        when = torch.randint(8, (size,), generator=generator)
        place = torch.arange(32) - (4 * when[:, None] + 1.5)
        noise = 1.5 * torch.randn(size, 32, generator=generator)
        return (16_000 + 10 * torch.exp(-(place**2) / 4) + noise).round(), when

    def loss(index: int) -> Tensor:
        counts, when = batch(draws(seed, index), 128)
        return F.cross_entropy(model(counts), when)

    counts, when = batch(fixed(110), 600)
    measure = accuracy(model, counts, when)

    def evaluate() -> float:
        model.eval()
        return measure()

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


class AltitudeFilter(nn.Module):
    """A Kalman filter of altitude and climb, whose gains are learnt; one second a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("motion", torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        self.motion: Tensor
        self.gain = nn.Parameter(torch.tensor([0.3, 0.02]))

    def forward(self, measured: Tensor) -> Tensor:
        """From altitudes [B, T] to how far each next one is from what was foreseen, [B, T - 4]."""
        state = torch.stack([measured[:, 0], torch.zeros(len(measured))], 1)
        off = []
        for now in measured.unbind(1)[1:]:
            foreseen = F.linear(state, self.motion)
            off.append(now - foreseen[:, 0])
            state = foreseen + off[-1][:, None] * self.gain
        return torch.stack(off[3:], 1)


def altitude_filter(seed: int) -> Training:
    """Aeroplanes at 3 to 11 km, measured to about three metres."""
    torch.manual_seed(seed)
    model = AltitudeFilter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def measured(generator: torch.Generator, size: int) -> Tensor:
        start = 3000 + 8000 * torch.rand(size, 1, generator=generator)
        climb = torch.randn(size, 24, generator=generator).cumsum(1)
        return start + climb.cumsum(1) + 3 * torch.randn(size, 24, generator=generator)

    def off(generator: torch.Generator, size: int) -> Tensor:
        return (model(measured(generator, size)) / 10).square().mean()

    def evaluate() -> float:
        with torch.no_grad():
            return 10 * math.sqrt(float(off(fixed(111), 500)))

    return Training(
        model,
        optimizer,
        lambda index: off(draws(seed, index), 32),
        evaluate,
        schedule=cosine(optimizer, 2e-2, 150),
    )


class Critic(nn.Module):
    """The value of a state when a reward of 5 is usual and the discount is 0.99."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(3, 48, 1, activation=nn.Tanh)
        with torch.no_grad():
            self.net[-1].bias.fill_(500)

    def forward(self, state: Tensor) -> Tensor:
        value: Tensor = self.net(state)[:, 0]
        return value


def critic_of_long_horizons(seed: int) -> Training:
    """A value function by its Bellman residual; rewards are not normalised."""
    torch.manual_seed(seed)
    model = Critic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    weights = torch.tensor([1.0, -0.5, 0.25])

    def loss(index: int) -> Tensor:
        state = torch.randn(256, 3, generator=draws(seed, index))
        reward = 5 + state @ weights
        residual = model(state) - reward - 0.99 * model(0.8 * state)
        return residual.square().mean()

    def evaluate() -> float:
        state = torch.randn(800, 3, generator=fixed(112))
        with torch.no_grad():
            value = model(state)
        off = (value - value.mean()) - state @ weights / (1 - 0.99 * 0.8)
        return float(off.std())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


def _gaussian_kernel(a: Tensor, b: Tensor) -> Tensor:
    square = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
    return torch.exp(-square / 2)


def places_by_mean_discrepancy(seed: int) -> Training:
    """A generator of places some 40 km from a map's corner; kernels compare it with true ones."""
    torch.manual_seed(seed)
    model = perceptron(4, 48, 2)
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([40.0, 30.0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def truth(generator: torch.Generator, size: int) -> Tensor:
        angle = math.pi * torch.rand(size, 1, generator=generator)
        ring = 2 * torch.cat([angle.cos(), angle.sin()], 1)
        return torch.tensor([40.0, 30.0]) + ring + 0.1 * torch.randn(size, 2, generator=generator)

    def discrepancy(generator: torch.Generator, size: int) -> Tensor:
        fake = model(torch.randn(size, 4, generator=generator))
        true = truth(generator, size)
        alike = _gaussian_kernel(fake, fake).mean() + _gaussian_kernel(true, true).mean()
        answer: Tensor = alike - 2 * _gaussian_kernel(fake, true).mean()
        return answer

    def evaluate() -> float:
        with torch.no_grad():
            return float(discrepancy(fixed(113), 600))

    return Training(
        model,
        optimizer,
        lambda index: discrepancy(draws(seed, index), 128),
        evaluate,
        schedule=cosine(optimizer, 1e-2, 200),
    )


class Areas(nn.Module):
    """Areas of fields from the corners that a camera sees, calibrated by a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.calibrate = nn.Linear(2, 2)
        with torch.no_grad():
            self.calibrate.weight.copy_(torch.eye(2))

    def forward(self, corners: Tensor) -> Tensor:
        x, y = self.calibrate(corners).unbind(-1)
        twice = (x * y.roll(-1, 1) - x.roll(-1, 1) * y).sum(1)
        return 0.5 * twice / 10_000


def areas_by_shoelace(seed: int) -> Training:
    """Quadrangles of some hundred pixels in a picture of four thousand."""
    torch.manual_seed(seed)
    model = Areas()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    warp = torch.tensor([[1.2, 0.3], [-0.2, 0.9]])

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        around = torch.tensor([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
        half = 40 + 60 * torch.rand(size, 4, 2, generator=generator)
        middle = 200 + 3600 * torch.rand(size, 1, 2, generator=generator)
        corners = around * half
        x, y = (corners @ warp.T).unbind(-1)
        area = 0.5 * (x * y.roll(-1, 1) - x.roll(-1, 1) * y).sum(1) / 10_000
        return corners + middle, area

    return fitted(model, batch, seed, optimizer=optimizer, size=64, steps=300, peak=1e-2)


CASES = (
    Case(
        "fares_by_coordinates",
        "Generated fares of taxis by degrees, which a linear layer standardises.",
        300,
        fares_by_coordinates,
        "relative error",
        False,
        0.1,
    ),
    Case(
        "sales_by_hours_since_1970",
        "Generated sales by hours since 1970, which a linear layer standardises.",
        300,
        sales_by_hours_since_1970,
        "relative error",
        False,
        0.1,
    ),
    Case(
        "sales_by_hours_of_the_record",
        "Generated sales by hours since 1970, from which the model subtracts an origin.",
        300,
        sales_by_hours_of_the_record,
        "relative error",
        False,
        0.1,
    ),
    Case(
        "pulses_on_a_pedestal",
        "The time of a generated pulse of ten counts on a detector's pedestal of 16,000.",
        300,
        pulses_on_a_pedestal,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "altitude_filter",
        "The gains of a Kalman filter of altitudes in metres, generated.",
        150,
        altitude_filter,
        "RMSE of the next altitude in metres",
        False,
        0.5,
    ),
    Case(
        "critic_of_long_horizons",
        "Values near 500 by their Bellman residual, generated.",
        300,
        critic_of_long_horizons,
        "deviation of the advantage's error",
        False,
        0.3,
    ),
    Case(
        "places_by_mean_discrepancy",
        "A generator of places on a map, by the maximum mean discrepancy.",
        200,
        places_by_mean_discrepancy,
        "discrepancy",
        False,
        0.02,
    ),
    Case(
        "areas_by_shoelace",
        "Areas of generated fields in a large picture, by the shoelace formula.",
        300,
        areas_by_shoelace,
        "relative error",
        False,
        0.05,
    ),
)
