"""More trainings of everyday: pictures, sets, series and quantiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    accuracy,
    cosine,
    mlp,
    relative_rmse,
    rng,
    supervised,
)


class SetNet(nn.Module):
    """A network of the sum over a set."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = mlp(3, 24, 24), mlp(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(F.relu(self.each(x)).sum(1))


def spread_of_swarms(seed: int) -> Training:
    """How much swarms of twelve are spread."""
    torch.manual_seed(seed)
    model = SetNet()

    def swarms(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        width = 0.3 + torch.rand(n, 1, 1, generator=g)
        x = width * torch.randn(n, 12, 3, generator=g)
        return x, x.std(1).mean(-1, keepdim=True)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(model, optimizer, seed, swarms, F.smooth_l1_loss, relative_rmse, 64, 500)


class Patches(nn.Module):
    """A transformer layer over sixteen patches, of which some are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.place = nn.Linear(4, 24), nn.Parameter(0.02 * torch.randn(16, 24))
        self.hidden = nn.Parameter(torch.zeros(24))
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, hide = batch
        h = torch.where(hide[..., None], self.hidden, self.into(x)) + self.place
        return self.out(self.layer(h))[hide]


def hidden_patches(seed: int) -> Training:
    """Half of the patches of a picture of digits, from the other half."""
    from sklearn import datasets

    torch.manual_seed(seed)
    model = Patches()
    pictures = torch.tensor(datasets.load_digits().images, dtype=torch.float32) / 16 - 0.5
    patches = pictures.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)

    def sample(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = torch.randint(0, len(patches), (n,), generator=g)
        hide = torch.rand(n, 16, generator=g).argsort(-1) < 6
        return (patches[rows], hide), patches[rows][hide]

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return supervised(model, optimizer, seed, sample, F.mse_loss, relative_rmse, 32, 400)


def wages_by_quantiles(seed: int) -> Training:
    """The tenth, the half and the nine tenths of log wages."""
    torch.manual_seed(seed)
    model = mlp(5, 24, 3)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def people(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 5, generator=g)
        spread = 0.3 + 0.2 * torch.sigmoid(x[:, :1])
        return x, 2.5 + 0.4 * x[:, 1:2] + spread * torch.randn(n, 1, generator=g)

    def pinball(out: Tensor, y: Tensor) -> Tensor:
        over = y - out
        return torch.maximum(levels * over, (levels - 1) * over).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(
        model, optimizer, seed, people, pinball, lambda o, y: float(pinball(o, y)), 128, 2000
    )


class Memory(nn.Module):
    """A recurrent network that reads a series."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])


def marked_sums(seed: int) -> Training:
    """Whether the two marked numbers of a series have a positive sum."""
    torch.manual_seed(seed)
    model = Memory()

    def series(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        value = torch.randn(n, 10, generator=g)
        mark = (torch.rand(n, 10, generator=g).argsort(-1) < 2).float()
        return torch.stack([value, mark], -1), ((value * mark).sum(-1) > 0).long()

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return supervised(
        model, optimizer, seed, series, F.cross_entropy, accuracy, 64, 600, clip_norm=1.0
    )


def digits_by_cosine_rate(seed: int) -> Training:
    """Digits by momentum, a cosine of rates and smoothed labels."""
    from sklearn import datasets

    torch.manual_seed(seed)
    data = datasets.load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1300, (64,), generator=rng(seed, step))
        return F.cross_entropy(model(x[rows]), y[rows], label_smoothing=0.1)

    return Training(
        model,
        optimizer,
        loss,
        lambda: accuracy(model(x[1300:]), y[1300:]),
        schedule=cosine(optimizer, 120),
    )


CASES = (
    Case(
        "spread_of_swarms",
        "The spread of a set of points by a sum over the set.",
        120,
        spread_of_swarms,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "hidden_patches",
        "A transformer layer fills in hidden patches of digits.",
        80,
        hidden_patches,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "wages_by_quantiles",
        "Three quantiles of wages by the pinball loss.",
        120,
        wages_by_quantiles,
        "loss",
        False,
        0.01,
    ),
    Case(
        "marked_sums",
        "A recurrent network adds the marked numbers of a series.",
        120,
        marked_sums,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "digits_by_cosine_rate",
        "Digits by momentum, with a cosine of rates.",
        120,
        digits_by_cosine_rate,
        "accuracy",
        True,
        0.03,
    ),
)
