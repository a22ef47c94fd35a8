"""Trainings of a few constants in their own units, each near a value that is known roughly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import draw, fit, root_mse


class Rooms(nn.Module):
    """A usual temperature for each room, and what the sun adds."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.sun = nn.Embedding(20, 1), nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.usual.weight, 20.0)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        room, sky = batch
        return self.usual(room) + self.sun(sky)


def room_temperatures(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Rooms()
    usual = 20 + 0.5 * torch.randn(20, 1, generator=draw(61)).sign()

    def hours(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        room = torch.randint(0, 20, (n,), generator=g)
        sky = torch.randn(n, 2, generator=g)
        return (room, sky), usual[room] + 0.5 * sky[:, :1] - 0.2 * sky[:, 1:]

    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    return fit(model, optimizer, seed, hours, F.mse_loss, root_mse, 256)


class Amplifiers(nn.Module):
    """A gain for each of sixteen channels."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def channel_gains(seed: int) -> Training:
    """Gains are off by some per cent; they are followed slowly."""
    torch.manual_seed(seed)
    model = Amplifiers()
    gain = 1 + 0.03 * torch.randn(16, generator=draw(62)).sign()

    def signals(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 5 * torch.randn(n, 16, generator=g)
        return x, gain * x

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    return fit(model, optimizer, seed, signals, F.mse_loss, root_mse)


class Lens(nn.Module):
    """Where a lens of unknown focal length and place throws a picture, in millimetres."""

    def __init__(self) -> None:
        super().__init__()
        self.focus = nn.Parameter(torch.tensor(50.0))
        self.shift = nn.Parameter(torch.tensor(10.0))

    def forward(self, distance: Tensor) -> Tensor:
        return 1 / (1 / self.focus - 1 / (1000 * distance)) + self.shift


def focal_length(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Lens()

    def looks(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        distance = 0.3 + torch.rand(n, generator=g)
        return distance, 1 / (1 / 50.6 - 1 / (1000 * distance)) + 10.3

    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    return fit(model, optimizer, seed, looks, F.l1_loss, root_mse)


def brake_distances(seed: int) -> Training:
    """A way to brake by speed and slope, by plain gradient descent."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[20.0, 12.0, -8.0]]))
        model.bias.fill_(40.0)
    truth = torch.tensor([21.0, 13.0, -9.0])

    def ways(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        return x, (x * truth).sum(-1, keepdim=True) + 41 + torch.randn(n, 1, generator=g)

    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    return fit(model, optimizer, seed, ways, F.mse_loss, root_mse, 128)


class Ratings(nn.Module):
    """A rating for each player, about 1,500."""

    def __init__(self) -> None:
        super().__init__()
        self.rating = nn.Parameter(torch.full((24,), 1500.0))

    def forward(self, pair: Tensor) -> Tensor:
        a, b = self.rating[pair].unbind(-1)
        return (a - b) / 174


def chess_ratings(seed: int) -> Training:
    """Players by their games."""
    torch.manual_seed(seed)
    model = Ratings()
    strength = torch.randn(24, generator=draw(63))

    def games(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        pair = torch.randint(0, 24, (n, 2), generator=g)
        chance = torch.sigmoid(strength[pair[:, 0]] - strength[pair[:, 1]])
        return pair, (torch.rand(n, generator=g) < chance).float()

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(out, y))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.45)
    loss = F.binary_cross_entropy_with_logits
    return fit(model, optimizer, seed, games, loss, score, 256, 4000)


class Dose(nn.Module):
    """How strongly cells answer to ten substances: a middle and a slope for each."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Parameter(torch.full((10,), -6.5))
        self.slope = nn.Parameter(torch.full((10,), 2.0))

    def forward(self, dose: Tensor) -> Tensor:
        return torch.sigmoid(self.slope * (dose - self.middle))


def dose_response(seed: int) -> Training:
    """Doses are logarithms of mol per litre."""
    torch.manual_seed(seed)
    model = Dose()
    middle = -6.5 + 0.25 * torch.randn(10, generator=draw(64)).sign()

    def doses(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        dose = -8 + 3 * torch.rand(n, 10, generator=g)
        return dose, torch.sigmoid(2.2 * (dose - middle))

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1.2e-3)
    return fit(model, optimizer, seed, doses, F.mse_loss, root_mse)


class Tide(nn.Module):
    """A tide by phases in degrees and heights in metres."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([180.0, 210.0, 240.0]))
        self.height = nn.Parameter(torch.tensor([2.0, 1.0, 1.0]))
        self.register_buffer("speed", torch.tensor([1.9323, 2.0, 1.0027]))

    def forward(self, day: Tensor) -> Tensor:
        turn = 2 * torch.pi * (day[:, None] * self.speed + self.phase / 360)
        return (self.height * torch.sin(turn)).sum(-1)


def tide_phases(seed: int) -> Training:
    torch.manual_seed(seed)
    model, there = Tide(), Tide()
    with torch.no_grad():
        there.phase.add_(torch.tensor([7.0, -6.0, 5.0]))

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        day = 28 * torch.rand(n, generator=g)
        with torch.no_grad():
            return day, there(day)

    optimizer = torch.optim.AdamW([model.phase], lr=5e-2, weight_decay=0.0)
    return fit(model, optimizer, seed, days, F.mse_loss, root_mse)


CASES = (
    Case("room_temperatures", "Rooms.", 120, room_temperatures, "degrees", False, 0.05),
    Case("channel_gains", "Channels.", 120, channel_gains, "RMSE", False, 0.03),
    Case("focal_length", "A lens.", 100, focal_length, "mm", False, 0.05),
    Case("brake_distances", "Ways.", 200, brake_distances, "metres", False, 0.1),
    Case("chess_ratings", "Ratings.", 200, chess_ratings, "cross-entropy", False, 0.01),
    Case("dose_response", "Substances.", 150, dose_response, "RMSE", False, 0.01),
    Case("tide_phases", "A tide.", 120, tide_phases, "metres", False, 0.02),
)
