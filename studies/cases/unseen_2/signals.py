"""Signals, pictures and fields as instruments deliver them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    accuracy,
    cosine,
    mlp,
    product,
    relative_rmse,
    rmse,
    rng,
    supervised,
)


class Sunlit(nn.Module):
    """Light from 256 directions, and what surfaces make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.log_light = nn.Parameter(torch.zeros(256))

    def forward(self, seen: Tensor) -> Tensor:
        return torch.log1p(seen @ self.log_light.exp())


def light_of_a_scene(seed: int) -> Training:
    """The light around a scene, sun included, from the tone-mapped brightness of its surfaces."""
    torch.manual_seed(seed)
    model, real = Sunlit(), Sunlit()
    g = rng(81)
    with torch.no_grad():
        real.log_light.copy_(torch.randn(256, generator=g))
        real.log_light[40:44] = 14.0

    def surfaces(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        seen = torch.rand(n, 256, generator=g) * (torch.rand(n, 256, generator=g) < 0.25)
        seen[:, 40:44] *= (torch.rand(n, 1, generator=g) < 0.5).float()
        return seen, torch.log1p(product(seen, real.log_light.detach().exp()[:, None])[:, 0])

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)
    return supervised(
        model, optimizer, seed, surfaces, F.mse_loss, rmse, 64, 1000,
        schedule=cosine(optimizer, 200),
    )  # fmt: skip


class LightCurve(nn.Module):
    """Brightness over modified Julian days: waves of given periods, and how strong each is."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(1, 12, bias=False)
        self.waves.weight.requires_grad_(False)
        period = torch.tensor([3.1, 4.4, 5.37, 6.8, 9.2, 13.7])
        with torch.no_grad():
            self.waves.weight[:, 0] = 2 * math.pi / period.repeat(2)
        self.out = nn.Linear(24, 1)

    def forward(self, day: Tensor) -> Tensor:
        phase = self.waves(day)
        return self.out(torch.cat([torch.sin(phase), torch.cos(phase)], -1))


def variable_star(seed: int) -> Training:
    """A pulsating star over two months; its days are counted as astronomers count them."""
    torch.manual_seed(seed)
    model = LightCurve()

    def nights(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = 60 * torch.rand(n, 1, generator=g)
        seen = torch.sin(2 * math.pi * t / 5.37) + 0.4 * torch.cos(2 * math.pi * t / 13.7)
        return 60_310 + t, seen + 0.05 * torch.randn(n, 1, generator=g)

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    return supervised(model, optimizer, seed, nights, F.mse_loss, relative_rmse)


class Array(nn.Module):
    """Places of eight microphones about their plan, in metres."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8, 2))
        way = torch.arange(8) * math.pi / 4
        self.register_buffer("plan", torch.stack([way.cos(), way.sin()], -1))
        self.register_buffer("wave", 2 * math.pi * torch.linspace(1500, 4500, 12)[None] / 343)

    def forward(self, source: Tensor) -> Tensor:
        """Phases (n, 8, 12) of sources at places (n, 2)."""
        way = (source[:, None] - self.plan - self.shift).square().sum(-1).sqrt()
        return way[..., None] @ self.wave


def microphones_in_a_hall(seed: int) -> Training:
    """Where microphones really hang, from the phases of tones of known sources."""
    torch.manual_seed(seed)
    model, real = Array(), Array()
    with torch.no_grad():
        real.shift.copy_(0.02 * torch.randn(8, 2, generator=rng(82)))

    def tones(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        way = 6.2832 * torch.rand(n, 1, generator=g)
        far = 8 + 20 * torch.rand(n, 1, generator=g)
        source = far * torch.cat([way.cos(), way.sin()], -1)
        apart = (source[:, None] - real.plan - real.shift.detach()).square().sum(-1).sqrt()
        return source, apart[..., None] * real.wave

    def mismatch(phase: Tensor, heard: Tensor) -> Tensor:
        return (1 - torch.cos(phase - heard)).mean()

    def centimetres(_p: Tensor, _h: Tensor) -> float:
        return 100 * float((model.shift - real.shift).abs().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return supervised(
        model, optimizer, seed, tones, mismatch, centimetres, 32, 10,
        schedule=cosine(optimizer, 150),
    )  # fmt: skip


def chebyshev(n: int) -> tuple[Tensor, Tensor]:
    """Chebyshev's points (n + 1,) and the matrix that differentiates at them."""
    x = torch.cos(math.pi * torch.arange(n + 1, dtype=torch.float64) / n)
    c = torch.ones(n + 1, dtype=torch.float64)
    c[0] = c[-1] = 2
    c = c * (-1) ** torch.arange(n + 1)
    apart = x[:, None] - x + torch.eye(n + 1)
    d = c[:, None] / c / apart
    return x, d - torch.diag(d.sum(-1))


class Membrane(nn.Module):
    """A membrane's shape at Chebyshev's points by its load."""

    def __init__(self) -> None:
        super().__init__()
        x, d = chebyshev(20)
        self.register_buffer("bend", (d @ d)[1:-1, 1:-1].float())
        self.register_buffer("place", x[1:-1].float())
        self.body = mlp(3, 32, 5, act=nn.Tanh)

    def shape(self, load: Tensor) -> Tensor:
        form = torch.stack([(1 - self.place**2) * self.place**k for k in range(5)])
        return (self.body(load)[..., None] * form).sum(1)

    def forward(self, load: Tensor) -> Tensor:
        return self.shape(load) @ self.bend.T


def loaded_membrane(seed: int) -> Training:
    """A spectral method: the shape whose second derivative is the load, for all loads of a kind."""
    torch.manual_seed(seed)
    model = Membrane()
    x = model.place
    kinds = torch.stack([x**0, x, x * x])

    def loads(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        load = 4 * torch.randn(n, 3, generator=g)
        return load, product(load, kinds)

    def balance(bend: Tensor, load: Tensor) -> Tensor:
        return (((bend - load) * (1 - x * x)).square()).mean()

    held, wanted = loads(500, rng(TEST))
    real = torch.linalg.solve(model.bend.double(), wanted.double().T).T.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        load, y = loads(64, rng(seed, step))
        return balance(model(load), y)

    def evaluate() -> float:
        return relative_rmse(model.shape(held), real)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 300))


class Heat(nn.Module):
    """Heat along a rod, step by step; temperatures in kelvin."""

    def __init__(self) -> None:
        super().__init__()
        self.log_spread, self.log_loss = (
            nn.Parameter(torch.tensor(-2.5)),
            nn.Parameter(torch.tensor(-4.0)),
        )
        self.register_buffer("stencil", torch.tensor([[[1.0, -2.0, 1.0]]]))

    def forward(self, t: Tensor) -> Tensor:
        for _ in range(10):
            bend = F.conv1d(F.pad(t, (1, 1), mode="replicate"), self.stencil)
            t = t + self.log_spread.exp() * bend - self.log_loss.exp() * (t - 293.15)
        return t


def thermograms_of_a_rod(seed: int) -> Training:
    """How fast heat spreads and is lost, from two pictures of a heat camera."""
    torch.manual_seed(seed)
    model, real = Heat(), Heat()
    with torch.no_grad():
        real.log_spread.fill_(-1.5)
        real.log_loss.fill_(-3.3)

    def pictures(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        place = torch.arange(40.0)
        at = 40 * torch.rand(n, 1, 1, generator=g)
        t = 293.15 + 1.5 * torch.exp(-(((place - at) / 3) ** 2))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return t, real(t) + 0.02 * torch.randn(n, 1, 40, generator=g)

    def error(_o: Tensor, _y: Tensor) -> float:
        off = [model.log_spread - real.log_spread, model.log_loss - real.log_loss]
        return float(torch.stack(off).abs().max())

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return supervised(
        model, optimizer, seed, pictures, F.mse_loss, error, 32, 10,
        schedule=cosine(optimizer, 120),
    )  # fmt: skip


def storms_in_pressure_maps(seed: int) -> Training:
    """Maps of pressure in pascal: does a low cross them? A norm stands behind the first layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.GroupNorm(8, 8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 2),
    )  # fmt: skip

    def maps(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 2, (n,), generator=g)
        grid = torch.arange(16.0)
        at = 3 + 10 * torch.rand(n, 2, 1, generator=g)
        far = (grid - at[:, 0]).square()[:, :, None] + (grid - at[:, 1]).square()[:, None]
        low = 900 * torch.exp(-far / 10) * y[:, None, None]
        tilt = 60 * torch.randn(n, 2, 1, 1, generator=g)
        slope = tilt[:, 0] * (grid - 8) + tilt[:, 1] * (grid - 8)[:, None]
        return (101_325 + slope - low + 60 * torch.randn(n, 16, 16, generator=g))[:, None], y

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(model, optimizer, seed, maps, F.cross_entropy, accuracy, 32, 400)


class Thermocouple(nn.Module):
    """A series of Chebyshev's polynomials from millivolts to degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 1)

    def forward(self, millivolts: Tensor) -> Tensor:
        turn = torch.acos((millivolts / 10 - 1).clamp(-1, 1))
        return self.out(torch.cat([torch.cos(k * turn) for k in range(1, 7)], -1))


def thermocouple_table(seed: int) -> Training:
    """A thermocouple's table as a polynomial, from 0 to 1,000 degrees and to a few hundredths."""
    torch.manual_seed(seed)
    model = Thermocouple()

    def table(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        u = 20 * torch.rand(n, 1, generator=g)
        return u, 500 + 480 * (u / 10 - 1) + 35 * torch.sin((u / 10 - 1) * 1.7)

    optimizer = torch.optim.Adam(model.parameters(), lr=20.0, betas=(0.9, 0.99))
    return supervised(
        model, optimizer, seed, table, F.mse_loss, rmse, 128, 2000,
        schedule=cosine(optimizer, 300, 1e-4),
    )  # fmt: skip


CASES = (
    Case(
        "light_of_a_scene",
        "Light around a scene, sun included, from tone-mapped surfaces.",
        200,
        light_of_a_scene,
        "log",
        False,
        0.1,
    ),
    Case(
        "variable_star",
        "A pulsating star over modified Julian days.",
        200,
        variable_star,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "microphones_in_a_hall",
        "Places of microphones from the phases of tones.",
        150,
        microphones_in_a_hall,
        "cm",
        False,
        0.3,
    ),
    Case(
        "loaded_membrane",
        "A membrane's shape by a spectral method, for loads of a kind.",
        300,
        loaded_membrane,
        "relative RMSE",
        False,
        0.1,
    ),
    Case(
        "thermograms_of_a_rod",
        "How heat spreads along a rod, in kelvin.",
        120,
        thermograms_of_a_rod,
        "log",
        False,
        0.1,
    ),
    Case(
        "storms_in_pressure_maps",
        "Lows in maps of pressure in pascal.",
        60,
        storms_in_pressure_maps,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "thermocouple_table",
        "A thermocouple's table to a few hundredths of a degree.",
        300,
        thermocouple_table,
        "degrees",
        False,
        0.05,
    ),
)
