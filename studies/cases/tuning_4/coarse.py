"""What few bits cannot tell apart, and trainings that look like it and are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, relative_rmse, rng


class Clock(nn.Module):
    """Waves of a learned rate at minutes that are counted from the start of the week."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 16), mlp(32, 24, 1)
        self.rates = 2 * torch.pi / torch.tensor([8.0, 12.0, 20.0, 60.0])

    def forward(self, minute: Tensor, x: Tensor) -> Tensor:
        h = self.into(x)
        angle = minute.to(h.dtype)[:, None] * self.rates.to(h.dtype)
        waves = torch.cat([torch.sin(angle), torch.cos(angle)], -1)
        return self.out(torch.cat([h, waves, h[:, :8] * waves], -1)).squeeze(-1)


def buses_by_the_minute(seed: int) -> Training:
    """The passengers of buses that come every eight to twenty minutes."""
    torch.manual_seed(seed)
    g = rng(TEST)
    minute = torch.randint(0, 1440, (3000,), generator=g)
    x = torch.randn(3000, 3, generator=g)
    y = torch.sin(2 * torch.pi * minute / 12) + 0.5 * x[:, 0] * torch.cos(2 * torch.pi * minute / 8)
    model = Clock()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (minute, x, y),
        lambda m, x, y: F.mse_loss(model(m, x), y),
        lambda m, x, y: relative_rmse(model(m, x), y),
        train=2400,
    )


class Depth(nn.Module):
    """Opening and closing brackets, added up one after another, and what the depth then means."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(2, 1)
        for p in self.step.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.step(x).squeeze(-1)
        depth = 300 + steps[:, 0]
        for i in range(1, x.shape[1]):
            depth = depth + steps[:, i]
        return (depth - 300) / 10


def stock_of_a_store(seed: int) -> Training:
    """The stock after 120 deliveries and sales of one piece, from 300 on."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randint(0, 2, (900, 120), generator=g)
    y = (2.0 * x - 1).sum(1) / 10
    model = Depth()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-2),
        seed,
        (F.one_hot(x, 2).float(), y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=600,
        batch=32,
    )


class Twins(nn.Module):
    """One minus a cosine, between embeddings of the same thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(64, 48, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        p, q = self.net(a), self.net(b)
        p = p / (p * p).mean(-1, keepdim=True).sqrt()
        q = q / (q * q).mean(-1, keepdim=True).sqrt()
        return 1 - (p * q).mean(-1)


def changes_of_a_digit(seed: int) -> Training:
    """By how little a digit was changed: one minus a cosine, which is near one."""
    torch.manual_seed(seed)
    x = digits()[0].flatten(1)
    model = Twins()
    way = torch.randn(64, generator=rng(TEST)) / 8

    def pairs(rows: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        much = torch.rand(len(rows), 1, generator=g)
        return x[rows], x[rows] + 0.5 * much * way, 0.02 * much.squeeze(1) ** 2

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        a, b, y = pairs(torch.randint(0, 1300, (64,), generator=g), g)
        return F.mse_loss(100 * model(a, b), 100 * y)

    def evaluate() -> float:
        a, b, y = pairs(torch.arange(1300, 1797), rng(TEST))
        return relative_rmse(model(a, b), y)

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, evaluate)


class Curvature(nn.Module):
    """The second difference of a profile, which is what a beam carries."""

    def __init__(self) -> None:
        super().__init__()
        self.height = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = 2 + self.height(x)
        return (h[:, 2:] - 2 * h[:, 1:-1] + h[:, :-2]) * 30


def loads_of_beams(seed: int) -> Training:
    """The bending of beams by their loads: second differences of heights about two."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 3, generator=g)
    at = torch.linspace(0, 3, 30)
    y = x[:, :1] * torch.sin(at) + 0.5 * torch.tanh(x[:, 1:2]) * torch.cos(2 * at) + 0.3 * x[:, 2:]
    model = Curvature()
    with torch.no_grad():
        model.height[-1].weight.mul_(0.05)
        model.height[-1].bias.zero_()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=900,
    )


class Leaky(nn.Module):
    """A memory that forgets one part in 500 of itself in each place."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.out = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.write(x)
        state = h[:, 0]
        for i in range(1, x.shape[1]):
            state = 0.998 * state + 0.05 * h[:, i]
        return self.out(state)


def habits_of_a_year(seed: int) -> Training:
    """What a customer bought most over 120 days, by a memory that hardly forgets."""
    torch.manual_seed(seed)
    g = rng(TEST)
    share = torch.softmax(0.4 * torch.randn(900, 4, generator=g), -1)
    days = torch.multinomial(share, 120, True, generator=g)
    x = F.one_hot(days, 4).float()
    y = x.sum(1).argmax(1)
    model = Leaky()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=600,
        batch=16,
    )


def pages_in_order(seed: int) -> Training:
    """Whether one page comes before another, by their numbers as learned vectors: an ordinary one."""
    torch.manual_seed(seed)
    g = rng(TEST)
    a, b = torch.randint(0, 300, (2, 6000), generator=g)
    y = (a < b).long()
    pages = nn.Embedding(300, 12)
    model = nn.ModuleDict({"pages": pages, "read": mlp(24, 32, 2)})

    def logits(a: Tensor, b: Tensor) -> Tensor:
        return model["read"](torch.cat([pages(a), pages(b)], -1))  # type: ignore[no-any-return]

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (a, b, y),
        lambda a, b, y: F.cross_entropy(logits(a, b), y),
        lambda a, b, y: accuracy(logits(a, b), y),
        train=5000,
        batch=128,
    )


CASES = (
    Case("buses_by_the_minute", "Passengers by the minute of the day.", 300, buses_by_the_minute,
         "relative RMSE", False, 0.08),
    Case("stock_of_a_store", "A stock of pieces.", 120, stock_of_a_store,
         "relative RMSE", False, 0.05),
    Case("changes_of_a_digit", "Small changes by one minus a cosine.", 250, changes_of_a_digit,
         "relative RMSE", False, 0.06),
    Case("loads_of_beams", "Bending by second differences.", 400, loads_of_beams,
         "relative RMSE", False, 0.05),
    Case("habits_of_a_year", "Habits by a memory of 120 days.", 60, habits_of_a_year,
         "NLL", False, 0.08),
    Case("pages_in_order", "The order of pages.", 250, pages_in_order, "accuracy", True, 0.04),
)  # fmt: skip
