"""Trainings whose errors are written in the units of the thing, large or small, or reach far back."""

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


class Vertical(nn.Module):
    """How much the plumb line leans east and north, in radians."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 32, 32, 2, act=nn.Tanh)
        with torch.no_grad():
            self.body[-1].weight.mul_(1e-4)
            self.body[-1].bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def leaning_plumb_line(seed: int) -> Training:
    """Deflections of the vertical over a massif, of some seconds of arc, from the terrain."""
    torch.manual_seed(seed)
    model = Vertical()
    effect = torch.randn(6, 2, generator=rng(71)) / 2

    def points(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 6, generator=g)
        return x, 3e-5 * torch.sin(product(x, effect))

    last = list(model.body[-1].parameters())
    rest = [p for layer in model.body[:-1] for p in layer.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": rest, "lr": 5e-3}, {"params": last, "lr": 1e-6}], eps=1e-20
    )
    return supervised(model, optimizer, seed, points, F.mse_loss, relative_rmse)


def critic_with_clipped_weights(seed: int) -> Training:
    """Tells two clouds apart by a mean difference; its weights are clipped after each step."""
    torch.manual_seed(seed)
    model = mlp(2, 48, 48, 48, 1)

    def clouds(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, generator=g)
        way = 6.2832 * torch.rand(n, 1, generator=g)
        ring = torch.cat([way.cos(), way.sin()], -1) * 2 + 0.2 * torch.randn(n, 2, generator=g)
        return x, ring

    def apart(n: int, g: torch.Generator) -> Tensor:
        x, ring = clouds(n, g)
        return model(x).mean() - model(ring).mean()

    def clip(_step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.01, 0.01)

    def distance() -> float:
        clip(0)
        return -1e6 * float(apart(4000, rng(TEST)))

    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-4, eps=1e-16)
    return Training(model, optimizer, lambda i: apart(128, rng(seed, i)), distance, schedule=clip)


class Beat(nn.Module):
    """An autoencoder of heart beats."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv1d(1, 8, 7, stride=2, padding=3), nn.Tanh())
        self.back = nn.ConvTranspose1d(8, 1, 8, stride=2, padding=3)
        with torch.no_grad():
            self.back.weight.mul_(1e-3)
            self.back.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.into(1e3 * x))


def heart_beats_in_volts(seed: int) -> Training:
    """Electrocardiograms in volts, cleaned of noise; a beat is a thousandth."""
    torch.manual_seed(seed)
    model = Beat()

    def beats(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.linspace(-1, 1, 128)
        at, wide = 0.5 * torch.rand(n, 1, generator=g) - 0.25, 0.03
        spike = torch.exp(-(((t - at) / wide) ** 2))
        wave = 0.2 * torch.exp(-(((t - at - 0.4) / 0.12) ** 2))
        clean = 4e-4 * (spike + wave)[:, None]
        return clean + 4e-5 * torch.randn(n, 1, 128, generator=g), clean

    optimizer = torch.optim.Adam(
        [
            {"params": model.into.parameters(), "lr": 1e-2},
            {"params": model.back.parameters(), "lr": 4e-5},
        ],
        eps=1e-18,
    )
    return supervised(model, optimizer, seed, beats, F.mse_loss, relative_rmse, 32, 200)


class Line(nn.Module):
    """A spectrum by its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 32, 64, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def spectra_of_stars(seed: int) -> Training:
    """Spectra by temperature and the like; the loss is chi square, whose errors are a thousandth."""
    torch.manual_seed(seed)
    model = Line()
    lines = torch.randn(4, 64, generator=rng(73)) / 2

    def stars(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, torch.tanh(product(x, lines)) + 1e-3 * torch.randn(n, 64, generator=g)

    def chi_square(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y) / 1e-3).square().sum(-1).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(model, optimizer, seed, stars, chi_square, relative_rmse, 32, 500)


class Houses(nn.Module):
    """Prices of houses in dollars."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7, 32, 1)
        self.register_buffer("usual", torch.tensor([410_000.0]))
        self.register_buffer("spread", torch.tensor([150_000.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.usual + self.spread * self.body(x)


def houses_in_dollars(seed: int) -> Training:
    """Prices of houses; the loss is in squared dollars."""
    torch.manual_seed(seed)
    model = Houses()
    worth = torch.randn(7, 1, generator=rng(74)) / 3

    def houses(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 7, generator=g)
        return x, 410_000 + 150_000 * torch.tanh(product(x, worth)) * (1 + 0.1 * x[:, :1])

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(model, optimizer, seed, houses, F.mse_loss, relative_rmse, 64, 1000)


class Frozen(nn.Module):
    """A trained chain of small sigmoids that stays, and a layer in front of it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.rest = mlp(6, 12, 12, 12, 12, 12, 12, 1, act=nn.Sigmoid)
        for p in self.rest.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.front(x))


def sensors_swapped(seed: int) -> Training:
    """A machine's old network stays; its sensors were mixed up, and a layer in front unmixes them."""
    torch.manual_seed(74)
    model, old = Frozen(), Frozen()
    with torch.no_grad():
        for mine, theirs in zip(model.rest, old.rest, strict=True):
            if isinstance(mine, nn.Linear):
                mine.weight.mul_(1.2)
                theirs.load_state_dict(mine.state_dict())
        turn = torch.linalg.qr(torch.randn(6, 6, generator=rng(75)))[0]
        old.front.weight.copy_(turn)
        old.front.bias.zero_()
    torch.manual_seed(seed)
    with torch.no_grad():
        model.front.weight.copy_(turn + 0.5 * torch.randn(6, 6))
        model.front.bias.zero_()

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 6, generator=g)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return x, old(x)

    optimizer = torch.optim.Adam(model.front.parameters(), lr=1e-2, eps=1e-20)
    return supervised(model, optimizer, seed, rows, F.mse_loss, relative_rmse)


class Aquifer(nn.Module):
    """The water table between two rivers, in metres, by the place in metres."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1, 24, 16, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        s = x / 1000
        return 10 * self.body(2 * s - 1) * s * (1 - s)


def water_table(seed: int) -> Training:
    """Steady flow between two rivers, a kilometre apart; the equation is the loss."""
    torch.manual_seed(seed)
    model = Aquifer()

    def rain(x: Tensor) -> Tensor:
        return -2e-5 * (1 + torch.sin(x / 150))

    def loss(step: int) -> Tensor:
        x = (1000 * torch.rand(48, 1, generator=rng(seed, step))).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend - rain(x)).square().mean()

    x = torch.linspace(0, 1000, 201, dtype=torch.float64)
    first = -2e-5 * (x * x / 2 - 150**2 * torch.sin(x / 150))
    real = (first - first[-1] * x / 1000).float()[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-20)

    def evaluate() -> float:
        return relative_rmse(model(x.float()[:, None]), real)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 150))


class Flow(nn.Module):
    """A river's level and its salt; salt is a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.level, self.salt = mlp(5, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.level(h), self.salt(h)


def level_and_salt(seed: int) -> Training:
    """Two targets in one loss; salt is weighted by a ten-millionth, as a tutorial has it."""
    torch.manual_seed(seed)
    model = Flow()
    effect = torch.randn(5, 2, generator=rng(76)) / 2

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 5, generator=g)
        return x, torch.sin(product(x, effect))

    def both(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(out[0], y[:, :1]) + 1e-7 * F.mse_loss(out[1], y[:, 1:])

    def salt(out: tuple[Tensor, Tensor], y: Tensor) -> float:
        return relative_rmse(out[1], y[:, 1:])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    return supervised(model, optimizer, seed, days, both, salt)


def photographs_of_the_night(seed: int) -> Training:
    """Slight noise is taken from pictures; the loss is a mean over all pixels of a batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))
    with torch.no_grad():
        model[-1].weight.mul_(0.1)
        model[-1].bias.zero_()

    def pictures(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        grid = torch.linspace(0, 1, 48)
        k = 3 + 5 * torch.rand(n, 4, 1, generator=g)
        wave = torch.sin(k[:, 0] * grid + k[:, 2])[:, :, None] * torch.sin(k[:, 1] * grid)[:, None]
        noise = 0.01 * torch.randn(n, 1, 48, 48, generator=g)
        return 0.02 * wave[:, None] + noise, noise

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-15)
    return supervised(model, optimizer, seed, pictures, F.mse_loss, relative_rmse, 24, 24)


class Compass(nn.Module):
    """The earth's field in tesla from raw readings of three coils."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 24, 3, act=nn.Tanh)
        self.register_buffer("tesla", torch.full((3,), 5e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.tesla * self.body(x)


def compass_in_a_phone(seed: int) -> Training:
    """A compass is corrected for iron nearby and for warmth; fields are in tesla."""
    torch.manual_seed(seed)
    model = Compass()
    mix = torch.eye(3) + 0.3 * torch.randn(3, 3, generator=rng(78))

    def readings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        way = F.normalize(torch.randn(n, 3, generator=g), dim=-1)
        warm = torch.randn(n, 1, generator=g)
        return torch.cat([product(way, mix) * (1 + 0.1 * warm) + 0.3, warm], -1), 5e-5 * way

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-18)
    return supervised(model, optimizer, seed, readings, F.mse_loss, relative_rmse, 256, 1000)


CASES = (
    Case(
        "leaning_plumb_line",
        "Deflections of the vertical in radians from the terrain.",
        200,
        leaning_plumb_line,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "critic_with_clipped_weights",
        "A critic of two clouds whose weights are clipped.",
        150,
        critic_with_clipped_weights,
        "1e-6",
        True,
        5.0,
    ),
    Case(
        "heart_beats_in_volts",
        "Noise is taken from electrocardiograms in volts.",
        160,
        heart_beats_in_volts,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "spectra_of_stars",
        "Spectra of stars by a chi square with errors of a thousandth.",
        200,
        spectra_of_stars,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "houses_in_dollars",
        "Prices of houses in dollars, squared errors in dollars.",
        150,
        houses_in_dollars,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "sensors_swapped",
        "A layer in front of a frozen old network of sigmoids.",
        200,
        sensors_swapped,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "water_table",
        "The water table between two rivers from its equation.",
        150,
        water_table,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "level_and_salt",
        "Two targets, one of which has a weight of a ten-millionth.",
        150,
        level_and_salt,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "photographs_of_the_night",
        "Slight noise in pictures, a mean over all pixels.",
        80,
        photographs_of_the_night,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "compass_in_a_phone",
        "A phone's compass in tesla.",
        150,
        compass_in_a_phone,
        "relative RMSE",
        False,
        0.05,
    ),
)
