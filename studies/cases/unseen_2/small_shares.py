"""Losses in which much is averaged, seldom happens or counts little."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    binary_accuracy,
    mlp,
    product,
    relative_rmse,
    rng,
    supervised,
)


class LinkNet(nn.Module):
    """Places of people in a space in which acquaintances are near."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.bias = (
            nn.Parameter(0.3 * torch.randn(300, 8)),
            nn.Parameter(-torch.ones(1)),
        )

    def forward(self, links: Tensor) -> Tensor:
        h = links @ self.place
        return h @ h.T + self.bias


def acquaintances(seed: int) -> Training:
    """A graph autoencoder: all pairs of three hundred people, mostly strangers."""
    torch.manual_seed(seed)
    g = rng(72)
    group = torch.arange(300) % 12
    links = torch.rand(300, 300, generator=g) < torch.where(group[:, None] == group, 0.4, 0.004)
    links = links.float().triu(1)
    hidden = torch.rand(300, 300, generator=g) < 0.15
    seen = links * ~hidden
    seen = seen + seen.T
    mix = seen + torch.eye(300)
    mix = mix / mix.sum(-1, keepdim=True)
    model = LinkNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    rare = 10.0

    def loss(_step: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(mix), seen, pos_weight=torch.tensor(rare))

    def evaluate() -> float:
        out = model(mix)[hidden & (torch.ones(300, 300).triu(1) > 0)]
        y = links[hidden & (torch.ones(300, 300).triu(1) > 0)]
        yes, no = out[y > 0.5], out[y < 0.5]
        return float((yes[:, None] > no).float().mean())

    return Training(model, optimizer, loss, evaluate)


class Slide(nn.Module):
    """Attention over the tiles of a slide."""

    def __init__(self) -> None:
        super().__init__()
        self.tile, self.look, self.out = mlp(6, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.tile(x))
        share = torch.softmax(self.look(h), 1)
        return self.out((share * h).sum(1)).squeeze(-1)


def tiles_of_a_slide(seed: int) -> Training:
    """Whether one of 400 tiles is ill; only the slide has a label."""
    torch.manual_seed(seed)
    model = Slide()

    def slides(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = (torch.rand(n, generator=g) < 0.5).float()
        x = torch.randn(n, 400, 6, generator=g)
        x[:, :8, 0] += 5 * y[:, None]
        return x, y

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = F.binary_cross_entropy_with_logits
    return supervised(model, optimizer, seed, slides, loss, binary_accuracy, 16, 300)


def lesions_in_volumes(seed: int) -> Training:
    """Small lesions in volumes of 24 voxels a side; focal loss, a mean over all voxels."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 1, 3, padding=1))
    with torch.no_grad():
        model[-1].bias.fill_(-4.6)

    def volumes(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        grid = torch.arange(24.0)
        at = 4 + 16 * torch.rand(n, 3, 1, generator=g)
        far = (grid - at).square()
        ball = far[:, 0, :, None, None] + far[:, 1, None, :, None] + far[:, 2, None, None]
        mask = (ball < 6).float()[:, None]
        return 1.5 * mask + torch.randn(n, 1, 24, 24, 24, generator=g), mask

    def focal(out: Tensor, mask: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(out, mask, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    def overlap(out: Tensor, mask: Tensor) -> float:
        said = torch.sigmoid(out)
        return float(2 * (said * mask).sum() / (said + mask).sum())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, volumes, focal, overlap, 2, 12)


class Fund(nn.Module):
    """Shares of twelve stocks in a fund."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 24, 12, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), -1)


def fund_that_follows_an_index(seed: int) -> Training:
    """A fund of twelve stocks shall follow an index from hour to hour; squared differences."""
    torch.manual_seed(seed)
    model = Fund()
    share = torch.randn(6, 12, generator=rng(77)) / 2

    def hours(n: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.randn(n, 6, generator=g)
        returns = 2e-3 * torch.randn(n, 12, generator=g)
        index = (torch.softmax(product(x, share), -1) * returns).sum(-1)
        return x, (returns, index)

    def error(shares: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        return ((shares * seen[0]).sum(-1) - seen[1]).square().mean()

    def relative(shares: Tensor, seen: tuple[Tensor, Tensor]) -> float:
        return float(error(shares, seen).sqrt() / seen[1].std())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    return supervised(model, optimizer, seed, hours, error, relative, 128, 2000)


class Tilt(nn.Module):
    """How much heavier claims are drawn, by the kind of a portfolio."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 16, 4, act=nn.Tanh)

    def forward(self, kind: Tensor) -> Tensor:
        return self.body(kind)


def ruin_of_an_insurer(seed: int) -> Training:
    """A rare ruin is sampled with heavier claims; the second moment of the estimate is made small."""
    torch.manual_seed(seed)
    model = Tilt()

    def second_moment(n: int, g: torch.Generator) -> Tensor:
        kind = torch.rand(n, 3, generator=g)
        lean = torch.cat([kind, 1 - kind[:, :1]], -1)
        tilt = model(kind) + 1.0
        drawn = torch.randn(n, 4, generator=g) + 1.5
        weight = (0.5 * 1.5**2 - 1.5 * drawn).sum(-1)
        ruin = ((lean * drawn).sum(-1) > 4.5 * lean.square().sum(-1).sqrt()).float()
        apart = (0.5 * tilt.square() - tilt * drawn).sum(-1)
        return (ruin * torch.exp(weight + apart)).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)
    return Training(
        model,
        optimizer,
        lambda i: second_moment(512, rng(seed, i)),
        lambda: float(second_moment(200_000, rng(TEST)).log()),
    )


class Ahead(nn.Module):
    """Forecasts for each of thirty days ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.days = mlp(4, 24), nn.Linear(24, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.days(torch.tanh(self.body(x)))


def lake_weeks_ahead(seed: int) -> Training:
    """A lake's warmth on thirty days to come; each day counts two thirds of the day before."""
    torch.manual_seed(seed)
    model = Ahead()
    effect = torch.randn(4, 30, generator=rng(79)) / 2
    weight = (2 / 3) ** torch.arange(30.0)

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, torch.sin(product(x, effect)) + 0.1 * torch.randn(n, 30, generator=g)

    def discounted(out: Tensor, y: Tensor) -> Tensor:
        return (weight * (out - y).square()).mean()

    def last_week(out: Tensor, y: Tensor) -> float:
        return relative_rmse(out[:, -7:], y[:, -7:])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-16)
    return supervised(model, optimizer, seed, days, discounted, last_week)


CASES = (
    Case(
        "acquaintances",
        "A graph autoencoder over all pairs of three hundred people.",
        100,
        acquaintances,
        "ranking",
        True,
        0.02,
    ),
    Case(
        "tiles_of_a_slide",
        "Attention over 400 tiles, of which few are ill.",
        100,
        tiles_of_a_slide,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "lesions_in_volumes",
        "Small lesions in volumes by a focal loss over voxels.",
        60,
        lesions_in_volumes,
        "soft overlap",
        True,
        0.05,
    ),
    Case(
        "fund_that_follows_an_index",
        "A fund follows an index; squared differences of hourly returns.",
        150,
        fund_that_follows_an_index,
        "relative",
        False,
        0.05,
    ),
    Case(
        "ruin_of_an_insurer",
        "Importance sampling of a rare ruin.",
        150,
        ruin_of_an_insurer,
        "log",
        False,
        0.2,
    ),
    Case(
        "lake_weeks_ahead",
        "Forecasts of thirty days, each counting less than the day before.",
        150,
        lake_weeks_ahead,
        "relative RMSE",
        False,
        0.05,
    ),
)
