"""What one step hands to the next, what precedes a difference, and late fine fits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, cosine, mlp, nll, relative_rmse, rmse, rng


class Returns(nn.Module):
    """A value head behind a running mean in the head's own format (PopArt)."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.body, self.head = mlp(5, 32, 32), nn.Linear(32, 1)
        self.mean, self.wide = torch.zeros(1), wide

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x))).squeeze(-1)

    def error(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        mean = self.mean if self.wide else self.mean.to(out.dtype)
        mean = (0.998 * mean + 0.002 * y.mean().to(mean.dtype)).detach()
        self.mean = mean
        return F.smooth_l1_loss(out.float(), y - mean.float())


def returns_around_a_mean(seed: int, *, wide: bool = False) -> Training:
    """Returns around a slow running mean, which is kept as the head writes it."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 5, generator=g)
    y = 8 + x[:, 0] * x[:, 1] + 0.3 * torch.randn(1500, generator=g)
    model = Returns(wide=wide)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        seed,
        (x, y),
        model.error,
        lambda x, y: rmse(model(x) + float(model.mean), y),
        train=1000,
    )


def returns_around_a_wide_mean(seed: int) -> Training:
    """The same with the mean in FP32."""
    return returns_around_a_mean(seed, wide=True)


class Queue(nn.Module):
    """An encoder, its slow copy and the copy's last 256 answers (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.slow = mlp(64, 64, 24), mlp(64, 64, 24)
        self.slow.load_state_dict(self.now.state_dict())
        self.slow.requires_grad_(False)
        self.queue = F.normalize(torch.randn(256, 24), dim=1)

    def step(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, now in zip(self.slow.parameters(), self.now.parameters(), strict=True):
                slow.lerp_(now, 0.05)
            key = F.normalize(self.slow(b), dim=1)
        query = F.normalize(self.now(a), dim=1)
        own = (query * key).sum(1, keepdim=True)
        others = query @ self.queue.to(query.dtype).T
        self.queue = torch.cat([self.queue[len(a) :], key.to(self.queue.dtype)])
        logits = torch.cat([own, others], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def digits_against_a_queue(seed: int) -> Training:
    """Noisy views of digits against a queue of earlier ones."""
    torch.manual_seed(seed)
    x = digits()[0].flatten(1)
    model = Queue()

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        chosen = x[torch.randint(0, 1300, (32,), generator=g)]
        a, b = (chosen + 0.2 * torch.randn(chosen.shape, generator=g) for _ in "ab")
        return model.step(a, b)

    def evaluate() -> float:
        g = rng(TEST)
        a, b = (x[1300:] + 0.2 * torch.randn(497, 64, generator=g) for _ in "ab")
        a, b = (F.normalize(model.now(part), dim=1) for part in (a, b))
        return nll(a @ b.T / 0.1, torch.arange(497))

    optimizer = torch.optim.Adam(model.now.parameters(), lr=2e-3)
    return Training(model, optimizer, loss, evaluate)


class Integrator(nn.Module):
    """A cell that adds a small increment in each of 160 places."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.rate, self.out, self.size = mlp(2, 16, 8), nn.Linear(8, 1), size

    def forward(self, x: Tensor) -> Tensor:
        rates = self.size * torch.tanh(self.rate(x))
        level = 1 + rates[:, 0]
        for i in range(1, x.shape[1]):
            level = level + rates[:, i]
        return self.out((level - 1) / (12 * self.size)).squeeze(-1)


def levels_of_a_tank(seed: int) -> Training:
    """The level of a tank after 160 small flows: additions of half a thousandth to one."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(700, 160, 2, generator=g) + 0.5 * torch.randn(700, 1, 2, generator=g)
    y = (x[..., 0] * 0.7 + torch.tanh(x[..., 1])).sum(1) / 60
    model = Integrator(5e-4)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=500,
        batch=32,
    )


class OnePass(nn.Module):
    """A convolution of pressures, normalized by the mean of squares less the square of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 12, 5), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        mean = h.mean(-1, keepdim=True)
        var = ((h * h).mean(-1, keepdim=True) - mean * mean).mean(1, keepdim=True)
        h = (h - mean) * torch.rsqrt(var.clamp(min=1e-2))
        return self.out(F.relu(h).square().mean(-1)).squeeze(-1)


def storms_by_a_barometer(seed: int) -> Training:
    """How jagged a series of pressures around 100 kPa is, from its size relative to its spread."""
    torch.manual_seed(seed)
    g = rng(TEST)
    jagged = torch.rand(900, 1, generator=g)
    steps = torch.randn(900, 48, generator=g)
    x = (1 - jagged) * steps.cumsum(1) / 4 + 3 * jagged * steps.sign() * steps.square()
    model = OnePass()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (100 + x.unsqueeze(1), jagged.squeeze(1)),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=600,
        batch=32,
    )


class Calendar(nn.Module):
    """Sines of four periods of a day's number, and a trend."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.out = nn.Linear(1, 16), mlp(17, 32, 1)
        self.waves.requires_grad_(False)
        with torch.no_grad():
            period = torch.tensor([7.0, 30.4, 91.3, 365.25]).repeat(4)
            self.waves.weight.copy_((2 * math.pi / period)[:, None])

    def forward(self, day: Tensor) -> Tensor:
        features = torch.cat([torch.sin(self.waves(day)), (day - 20_000) / 500], 1)
        return self.out(features).squeeze(-1)


def sales_by_day(seed: int) -> Training:
    """Sales by the number of the day since 1970."""
    torch.manual_seed(seed)
    g = rng(TEST)
    day = 19_500 + 1000 * torch.rand(1500, 1, generator=g)
    turn = 2 * math.pi * day
    y = (
        torch.sin(turn / 7)
        + 0.5 * torch.cos(turn / 365.25)
        + 0.1 * torch.randn(1500, 1, generator=g)
    )
    model = Calendar()
    return fit(
        model,
        torch.optim.Adam(model.out.parameters(), lr=5e-3),
        seed,
        (day, y.squeeze(1)),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1000,
    )


def calibrated_to_the_end(seed: int) -> Training:
    """A mean and its error's width by likelihood, fine at the end: noise of a thousandth."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = 2 * torch.rand(1500, 1, generator=g) - 1
    y = torch.sin(3 * x) + 1e-3 * (1 + x.abs()) * torch.randn(1500, 1, generator=g)
    model = mlp(1, 48, 48, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        mean, log_width = model(x).chunk(2, 1)
        log_width = log_width.clamp(-5, 3)
        return (0.5 * ((y - mean) * torch.exp(-log_width)).square() + log_width).mean()

    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        loss,
        lambda x, y: float(loss(x, y)),
        train=1000,
        batch=128,
        schedule=cosine(optimizer, 400),
    )


CASES = (
    Case(
        "returns_around_a_mean",
        "Returns around a running mean in the head's format.",
        400,
        returns_around_a_mean,
        "RMSE",
        False,
        0.2,
    ),
    Case(
        "returns_around_a_wide_mean",
        "Returns around a running mean in FP32.",
        400,
        returns_around_a_wide_mean,
        "RMSE",
        False,
        0.2,
    ),
    Case(
        "digits_against_a_queue",
        "Views of digits against a queue.",
        150,
        digits_against_a_queue,
        "NLL among 497",
        False,
        0.15,
    ),
    Case(
        "levels_of_a_tank",
        "A level after many small flows.",
        100,
        levels_of_a_tank,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "storms_by_a_barometer",
        "Pressures normalized by a one-pass variance.",
        150,
        storms_by_a_barometer,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "sales_by_day",
        "Sales by sines of a day's number.",
        200,
        sales_by_day,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "calibrated_to_the_end",
        "A mean and a width by likelihood.",
        400,
        calibrated_to_the_end,
        "NLL",
        False,
        0.3,
    ),
)
