"""Infinities that nobody sees, and products of what is close to one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, mlp, relative_rmse, rng


class ByHand(nn.Module):
    """A root mean square norm as written by hand, over a stream with one large channel."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.into, self.body, self.out = nn.Linear(64, 32), mlp(32, 48, 32), nn.Linear(32, 10)
        self.gain = nn.Parameter(torch.ones(32))
        with torch.no_grad():
            self.into.bias[0] = size

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.flatten(1))
        for _ in range(2):
            normed = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * self.gain
            h = h + self.body(normed)
        mean = torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)
        return self.out(70 * h * mean)


def massive_channel(seed: int, size: float = 300.0) -> Training:
    """Digits by a stream with one channel of 300 and a norm written by hand."""
    torch.manual_seed(seed)
    model = ByHand(size)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
    )


def large_channel(seed: int) -> Training:
    """The same with a channel of 20, of which FP16 holds the square."""
    return massive_channel(seed, 20.0)


class Rational(nn.Module):
    """A network of quotients of polynomials (Padé)."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 24), nn.Linear(24, 24), nn.Linear(24, 1)])
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            h = self.size * layer(x)
            x = h * (1 + 0.1 * h * h) / (1 + h**4) ** 0.75
        return self.layers[-1](x).squeeze(-1)


def quotients(seed: int) -> Training:
    """A smooth function by quotients, the denominators of which grow with the fourth power."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 3, generator=g)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + torch.tanh(x[:, 2])
    model = Rational(6.0)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=900,
    )


class Kernel(nn.Module):
    """Bumps around places of a map: far from all of them they are 0, which is right."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(60, 2) * 100)
        self.log_width = nn.Parameter(torch.full((60,), math.log(width)))
        self.out = nn.Linear(60, 1)

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, None] - self.places
        z = (apart * apart).sum(-1) / torch.exp(2 * self.log_width)
        return self.out(torch.exp(-0.5 * z)).squeeze(-1)


def heights_by_bumps(seed: int) -> Training:
    """The heights of a map of some hundred metres by bumps; far squares overflow to a weight of 0."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = 100 * torch.randn(1500, 2, generator=g)
    y = torch.sin(x[:, 0] / 60) + torch.cos(x[:, 1] / 80)
    model = Kernel(40.0)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1000,
    )


def headings(seed: int) -> Training:
    """A direction from two small outputs by atan2, which no size of theirs changes."""
    torch.manual_seed(seed)
    g = rng(TEST)
    angle = 2 * math.pi * torch.rand(1500, generator=g)
    x = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos()], 1)
    x = x + 0.1 * torch.randn(x.shape, generator=g)
    model = mlp(3, 32, 2)

    def error(x: Tensor, angle: Tensor) -> Tensor:
        y = model(x) * 1e-6
        return (1 - torch.cos(torch.atan2(y[:, 1], y[:, 0]) - angle)).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, angle),
        error,
        lambda x, a: float(error(x, a)),
        train=1000,
    )


def died_and_lived(hazard: Tensor, day: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of death on a day, and of life after it, from daily hazards of (n, days)."""
    lives = torch.cumprod(1 - hazard, 1)
    before = torch.cat([torch.ones_like(lives[:, :1]), lives[:, :-1]], 1)
    return ((before - lives).gather(1, day).squeeze(1), lives.gather(1, day).squeeze(1))


def hazards_of_days(seed: int, scale: float = -7.5, days: int = 60) -> Training:
    """The day of failure of machines from hazards of 5 in 10,000, by a product over days."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 4, generator=g)
    rate = torch.exp(scale + x[:, :1] + 0.5 * x[:, 1:2]).expand(-1, days)
    fails = torch.rand(1500, days, generator=g) < rate
    day = torch.where(fails.any(1), fails.float().argmax(1), days - 1)[:, None]
    died = fails.any(1)
    model = mlp(4, 24, 1)
    nn.init.constant_(model[-1].bias, scale)

    def loss(x: Tensor, day: Tensor, died: Tensor) -> Tensor:
        p, s = died_and_lived(torch.sigmoid(model(x)).expand(-1, days), day)
        return -torch.log(torch.where(died, p, s) + 1e-9).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, day, died),
        loss,
        lambda *data: float(loss(*data)),
        train=1000,
        batch=128,
    )


def hazards_of_quarters(seed: int) -> Training:
    """The same with hazards of one in eight, which FP16 takes from one without harm."""
    return hazards_of_days(seed, -2.0, 12)


def light_along_rays(seed: int) -> Training:
    """Depths of fog along rays by the usual product of one minus alpha."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 6, generator=g)
    depth = 16 + 10 * torch.tanh(x[:, 0] + 0.5 * x[:, 1])
    model = mlp(6, 48, 48)
    place = torch.arange(48.0)

    def error(x: Tensor, depth: Tensor) -> Tensor:
        alpha = 1 - torch.exp(-0.02 * F.softplus(model(x)))
        clear = torch.cumprod(1 - alpha + 1e-10, 1)
        weight = alpha * torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], 1)
        seen = (weight * place).sum(1) / (weight.sum(1) + 1e-5)
        return F.smooth_l1_loss(seen, depth)

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, depth),
        error,
        lambda x, d: float(error(x, d)),
        train=900,
    )


def any_of_many_causes(seed: int) -> Training:
    """Whether any of 40 rare causes acts: one minus a product (noisy or)."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = (torch.rand(3000, 40, generator=g) < 0.3).float()
    true = 0.3 * torch.rand(40, generator=g).pow(6)
    y = (torch.rand(3000, generator=g) < 1 - torch.prod(1 - true * x, 1)).float()
    model = nn.ParameterDict({"logit": nn.Parameter(torch.full((40,), -6.0))})

    def entropy(x: Tensor, y: Tensor) -> Tensor:
        none = torch.prod(1 - torch.sigmoid(model["logit"]) * x, 1)
        return -torch.where(y > 0.5, torch.log(1 - none + 1e-8), torch.log(none + 1e-8)).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-2),
        seed,
        (x, y),
        entropy,
        lambda x, y: float(entropy(x, y)),
        train=2000,
        batch=128,
    )


CASES = (
    Case(
        "massive_channel",
        "A norm by hand over a stream with one massive channel.",
        250,
        massive_channel,
        "accuracy",
        True,
        0.1,
    ),
    Case(
        "large_channel",
        "A norm by hand over a stream with one large channel.",
        150,
        large_channel,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "quotients",
        "A smooth function by quotients of polynomials.",
        200,
        quotients,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "heights_by_bumps",
        "Heights of a map by bumps around places.",
        200,
        heights_by_bumps,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "headings",
        "Directions by atan2 of small outputs.",
        200,
        headings,
        "1 - cosine",
        False,
        0.02,
    ),
    Case(
        "hazards_of_days",
        "Daily hazards and a product over days.",
        200,
        hazards_of_days,
        "NLL",
        False,
        0.01,
    ),
    Case(
        "hazards_of_quarters",
        "Quarterly hazards and a product over quarters.",
        200,
        hazards_of_quarters,
        "NLL",
        False,
        0.03,
    ),
    Case(
        "light_along_rays",
        "Depths of fog along rays.",
        200,
        light_along_rays,
        "smooth L1 error",
        False,
        0.1,
    ),
    Case(
        "any_of_many_causes",
        "One minus a product over rare causes.",
        200,
        any_of_many_causes,
        "NLL",
        False,
        0.01,
    ),
)
