"""Trainings whose weights move a little at a time, or are wanted precisely."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import (
    decay,
    dense,
    draw,
    fit,
    hits,
    of_table,
    root_mse,
    share_unexplained,
    standard,
    times,
)


def moved_calibration(seed: int) -> Training:
    """A linear model of last year is adapted to a slight change at a small rate."""
    torch.manual_seed(seed)
    model = nn.Linear(30, 1)
    old = 1.5 + 0.3 * torch.randn(30, generator=draw(2))
    new = old + 0.03 * torch.randn(30, generator=draw(3)).sign()
    with torch.no_grad():
        model.weight.copy_(old[None])
        model.bias.zero_()

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 30, generator=g)
        return x, times(x, new[:, None])

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return fit(model, optimizer, seed, rows, F.mse_loss, root_mse, 128)


class Gauges(nn.Module):
    """An offset in metres and a gain for each gauge of a river."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(300 + 10 * torch.arange(12.0))
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        gauge, level = batch
        return self.offset[gauge] + self.gain[gauge] * level


def river_gauges(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Gauges()
    shift = torch.randn(12, generator=draw(9))

    def levels(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        gauge = torch.randint(0, 12, (n,), generator=g)
        level = torch.randn(n, generator=g)
        return (gauge, level), 300 + 10.0 * gauge + 0.5 * shift[gauge] + 1.1 * level

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, levels, F.smooth_l1_loss, root_mse)


class Films(nn.Module):
    """Ratings: a mean for each film and tastes."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(60, 4), nn.Embedding(40, 4)
        self.mean = nn.Embedding(40, 1)
        with torch.no_grad():
            self.mean.weight.fill_(3.5)
            self.people.weight.mul_(0.1)
            self.films.weight.mul_(0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        who, what = pairs.unbind(-1)
        return self.mean(what).squeeze(-1) + (self.people(who) * self.films(what)).sum(-1)


def film_ratings(seed: int) -> Training:
    """Stochastic gradient descent at the rate that such models have."""
    torch.manual_seed(seed)
    model = Films()
    mean = 3.5 + torch.randn(40, generator=draw(1))

    def ratings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs = torch.stack(
            [torch.randint(0, 60, (n,), generator=g), torch.randint(0, 40, (n,), generator=g)], -1
        )
        return pairs, mean[pairs[:, 1]] + 0.3 * torch.randn(n, generator=g)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return fit(model, optimizer, seed, ratings, F.mse_loss, root_mse, 256)


class Codebook(nn.Module):
    """Digits by their nearest code word, in pixel units."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.words = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        far = torch.cdist(x, self.words, compute_mode="donot_use_mm_for_euclid_dist")
        return self.words[far.argmin(-1)]


def digit_code_book(seed: int) -> Training:
    torch.manual_seed(seed)
    take = of_table("digits")

    def images(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = take(n, g)
        return x, x

    model = Codebook(images(12, draw(seed + 70))[0])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return fit(model, optimizer, seed, images, F.mse_loss, root_mse)


class Fall(nn.Module):
    """Gravity and drag from falls."""

    def __init__(self) -> None:
        super().__init__()
        self.gravity = nn.Parameter(torch.tensor(9.5))
        self.drag = nn.Parameter(torch.tensor(0.5))

    def forward(self, t: Tensor) -> Tensor:
        return self.gravity / self.drag * (1 - torch.exp(-self.drag * t))


def gravity(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Fall()

    def falls(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = 3 * torch.rand(n, generator=g)
        return t, 9.812 / 0.4 * (1 - torch.exp(-0.4 * t)) + 0.01 * torch.randn(n, generator=g)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return fit(
        model,
        optimizer,
        seed,
        falls,
        F.mse_loss,
        lambda *_: 1000 * abs(float(model.gravity) - 9.812),
        256,
        schedule=decay(optimizer, 250),
    )


def fine_tuned_wine(seed: int) -> Training:
    """A network for wine, trained for three half-classes, goes on at a rate of 1e-5."""
    torch.manual_seed(seed)
    model = dense(13, 32, 3, act=nn.Tanh)
    with torch.no_grad():
        model[0].weight.mul_(4)
        model[2].weight.mul_(4)
    take = of_table("wine", standard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(out, y))

    return fit(model, optimizer, seed, take, F.cross_entropy, score, 64)


def slow_flowers(seed: int) -> Training:
    """Irises in centimetres by plain gradient descent at a rate of 1e-3 from large weights."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(2.0 + 0.5 * torch.randn(3, 4))
    take = of_table("iris")
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(out, y))

    return fit(model, optimizer, seed, take, F.cross_entropy, score, 32)


class Decays(nn.Module):
    """Activity of a sample as a sum of known decays with unknown shares."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((4,), 60.0))
        self.register_buffer("rate", torch.tensor([0.1, 0.5, 2.0, 8.0]))

    def forward(self, t: Tensor) -> Tensor:
        return torch.exp(-t[:, None] * self.rate) @ self.share[:, None]


def mixed_isotopes(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Decays()
    share = torch.tensor([62.0, 58.5, 60.7, 61.0])

    def counts(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = 4 * torch.rand(n, generator=g).square()
        return t, times(torch.exp(-t[:, None] * model.rate), share[:, None])

    optimizer = torch.optim.NAdam(model.parameters(), lr=1.5e-2)
    return fit(model, optimizer, seed, counts, F.mse_loss, root_mse)


class Cloud(nn.Module):
    """Temperatures at places in space from anchors that move to where they are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = nn.Parameter(10 * torch.rand(24, 2))
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        far = (x[:, None] - self.anchors).square().sum(-1)
        return self.out(torch.exp(-far / 4))


def moving_anchors(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Cloud()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 10 * torch.rand(n, 2, generator=g)
        return x, torch.sin(x[:, :1]) * torch.cos(0.7 * x[:, 1:])

    optimizer = torch.optim.RMSprop(
        [
            {"params": [model.anchors], "lr": 1e-3},
            {"params": model.out.parameters(), "lr": 2e-2},
        ]
    )
    return fit(model, optimizer, seed, places, F.mse_loss, share_unexplained, 128)


class Wide(nn.Module):
    """A ranking of words by a table that is trained since long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.out = nn.Linear(16, 50, bias=False)

    def forward(self, word: Tensor) -> Tensor:
        return self.out(self.table(word))


def next_word_slowly(seed: int) -> Training:
    """A bigram model at a rate of 2e-4, its table as wide as torch makes it."""
    torch.manual_seed(seed)
    model = Wide()
    follow = torch.rand(50, 2, generator=draw(14)).mul(50).long()

    def pairs(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        word = torch.randint(0, 50, (n,), generator=g)
        which = torch.randint(0, 2, (n, 1), generator=g)
        return word, follow[word].gather(1, which).squeeze(1)

    optimizer = torch.optim.Adam(model.table.parameters(), lr=5e-4)

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(out, y))

    return fit(model, optimizer, seed, pairs, F.cross_entropy, score, 256)


def quick_digits(seed: int) -> Training:
    """Digits with a momentum of 0.9: weights that move at each step by far more than they round."""
    torch.manual_seed(seed)
    model = dense(64, 32, 10)
    take = of_table("digits", lambda x: x / 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(model, optimizer, seed, take, F.cross_entropy, hits)


CASES = (
    Case("moved_calibration", "A change.", 120, moved_calibration, "RMSE", False, 0.05),
    Case("river_gauges", "Offsets.", 150, river_gauges, "metres", False, 0.05),
    Case("film_ratings", "Ratings.", 120, film_ratings, "RMSE", False, 0.05),
    Case("digit_code_book", "Code words.", 100, digit_code_book, "RMSE", False, 0.05),
    Case("gravity", "A constant.", 250, gravity, "mm/s²", False, 3.0),
    Case("fine_tuned_wine", "Adaptation.", 100, fine_tuned_wine, "cross-entropy", False, 0.05),
    Case("slow_flowers", "Irises.", 150, slow_flowers, "cross-entropy", False, 0.05),
    Case("mixed_isotopes", "Shares.", 150, mixed_isotopes, "RMSE", False, 0.05),
    Case("moving_anchors", "Anchors.", 120, moving_anchors, "unexplained", False, 0.05),
    Case("next_word_slowly", "Bigrams.", 120, next_word_slowly, "cross-entropy", False, 0.02),
    Case("quick_digits", "Digits.", 100, quick_digits, "accuracy", True, 0.03),
)
