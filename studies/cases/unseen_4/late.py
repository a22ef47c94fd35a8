"""What changes towards the end of a training: sizes, temperatures, sensors, levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, relative_rmse, rng


class Shops(nn.Module):
    """A network for each purchase, a sum over a shop's purchases, a network for the sum's logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.out = mlp(4, 24, 12), mlp(12, 24, 1)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        together = of @ (60 * F.softplus(self.each(x)))
        return self.out(torch.log1p(together) - 7).squeeze(-1)


def shops_that_grow(seed: int) -> Training:
    """The revenue of shops, whose purchases are few until the sales at the end of the year."""
    torch.manual_seed(seed)
    model = Shops()

    def shops(count: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(12 * count, 4, generator=g)
        of = torch.eye(12).repeat_interleave(count, 1)
        worth = torch.exp(0.5 * x[:, 0] + 0.3 * x[:, 1] * x[:, 2])
        return x, of, torch.log((of @ worth) / 30) + 0.05 * torch.randn(12, generator=g)

    def loss(step: int) -> Tensor:
        x, of, y = shops(12 + step % 17 if step < 330 else 2000, rng(seed, step))
        return F.smooth_l1_loss(model(x, of), y)

    def evaluate() -> float:
        return sum(
            float((model(x, of) - y).abs().mean())
            for x, of, y in (shops(n, rng(TEST, n)) for n in (20, 2000))
        )

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, evaluate)


def choices_that_harden(seed: int) -> Training:
    """Which of 24 measurements tells most: a choice by softmax, whose temperature falls to nothing."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(2000, 24, generator=g)
    y = (x[:, 5] + 0.5 * x[:, 17] + 0.2 * torch.randn(2000, generator=g) > 0).long()
    model = nn.ModuleDict({"choose": mlp(4, 16, 24), "read": mlp(2, 24, 2)})
    asks = torch.eye(4)[:2]

    def logits(x: Tensor, temperature: float) -> Tensor:
        chosen = torch.softmax(model["choose"](asks) / temperature, -1)
        return model["read"](x @ chosen.T)  # type: ignore[no-any-return]

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1500, (64,), generator=rng(seed, step))
        return F.cross_entropy(logits(x[rows], math.exp(-step / 26)), y[rows])

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        loss,
        lambda: accuracy(logits(x[1500:], 1e-5), y[1500:]),
    )


class Channels(nn.Module):
    """Each channel's course through one small network, standardized by hand, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.course, self.out = nn.Linear(20, 12, bias=False), mlp(6 * 12, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.course(x)
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-8)
        return self.out(h.flatten(1))


def a_sensor_dies(seed: int) -> Training:
    """Three states of a machine by six sensors, one of which falls silent before the end."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(0, 3, (1500,), generator=g)
    phase, time = 6.3 * torch.rand(1500, 6, 1, generator=g), torch.arange(20.0)
    rate = torch.tensor([0.4, 0.7, 1.1])[y][:, None, None]
    x = torch.sin(rate * time + phase) + 0.8 * torch.randn(1500, 6, 20, generator=g)
    model = Channels()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def seen(rows: Tensor, *, dead: bool) -> Tensor:
        return x[rows] * (torch.arange(6) != 2)[:, None] if dead else x[rows]

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1000, (48,), generator=rng(seed, step))
        return F.cross_entropy(model(seen(rows, dead=step >= 318)), y[rows])

    test = torch.arange(1000, 1500)
    return Training(model, optimizer, loss, lambda: accuracy(model(seen(test, dead=True)), y[test]))


def baselines_that_wander(seed: int) -> Training:
    """Heart beats of three kinds, whose electrode comes loose: an offset of 6,000 microvolts."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(0, 3, (1500,), generator=g)
    time = torch.arange(32.0)
    width = torch.tensor([1.5, 2.5, 4.0])[y][:, None]
    x = 30 * torch.exp(-(((time - 16 - 2 * torch.randn(1500, 1, generator=g)) / width) ** 2))
    x = x + 3 * torch.randn(1500, 32, generator=g)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1000, (64,), generator=rng(seed, step))
        away = 10.0 if step < 260 else 6000.0
        return F.cross_entropy(model(x[rows] + away), y[rows])

    def evaluate() -> float:
        model.train()
        return nll(model(x[1000:] + 6000.0), y[1000:])

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, evaluate)


class Terms(nn.Module):
    """A series of a learned quantity, one term after another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.terms = nn.Linear(5, 1), 1
        self.share = nn.Parameter(torch.zeros(13))

    def forward(self, x: Tensor) -> Tensor:
        z = 2 * torch.tanh(self.inner(x)).squeeze(-1)
        term, out = torch.ones_like(z), self.share[0]
        for i in range(1, self.terms + 1):
            term = term * z * (1.4 if i > 1 else 1.0)
            out = out + self.share[i] * term / 2.8**i
        return out


def terms_one_by_one(seed: int) -> Training:
    """A curve by a power series to which a term is added every thirtieth step."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 5, generator=g)
    way = torch.tensor([0.5, -0.4, 0.3, 0.2, 0.1])
    y = torch.sin(2.5 * (x * way).sum(1)) + 0.05 * torch.randn(1500, generator=g)
    model = Terms()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1000,
        schedule=lambda step: setattr(model, "terms", 1 + step // 30),
    )


def digits_in_large_batches(seed: int) -> Training:
    """Digits whose batches and rate grow: an ordinary training that changes late."""
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1300, (32 if step < 200 else 512,), generator=rng(seed, step))
        return F.cross_entropy(model(x[rows].flatten(1)), y[rows])

    return Training(model, optimizer, loss, lambda: accuracy(model(x[1300:].flatten(1)), y[1300:]))


CASES = (
    Case("shops_that_grow", "Revenue of shops with ever more purchases.", 380, shops_that_grow,
         "two mean errors", False, 0.1),
    Case("choices_that_harden", "A choice of measurements by a falling temperature.", 300,
         choices_that_harden, "accuracy", True, 0.05),
    Case("a_sensor_dies", "States of a machine, and a sensor that falls silent.", 380,
         a_sensor_dies, "accuracy", True, 0.06),
    Case("baselines_that_wander", "Heart beats with a late offset.", 340, baselines_that_wander,
         "NLL", False, 0.1),
    Case("terms_one_by_one", "A power series, term by term.", 360, terms_one_by_one,
         "relative RMSE", False, 0.05),
    Case("digits_in_large_batches", "Digits by growing batches.", 300, digits_in_large_batches,
         "accuracy", True, 0.03),
)  # fmt: skip
