"""What grows, sharpens or falls silent towards the end of a training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, relative_rmse, rng


class Memory(nn.Module):
    """Attention without a softmax: keys and values are summed over everything that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 16)
        self.key, self.value, self.ask = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        keys, values = 30 * F.relu(self.key(h)), 12 * self.value(h)
        state = keys.transpose(1, 2) @ values
        read = (F.relu(self.ask(h[:, 0])).unsqueeze(1) @ state).squeeze(1)
        return self.out(F.normalize(read, dim=-1) * 4)


def texts_that_lengthen(seed: int) -> Training:
    """The commonest word of a text: of short texts, and at the end of long ones."""
    torch.manual_seed(seed)
    model = Memory()

    def texts(length: int, n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 10, (n,), generator=g)
        words = torch.randint(0, 10, (n, length), generator=g)
        same = torch.rand(n, length, generator=g) < 0.3
        return torch.where(same, y[:, None], words), y

    def loss(step: int) -> Tensor:
        words, y = texts(16 if step < 325 else 800, 12, rng(seed, step))
        return F.cross_entropy(model(words), y)

    def evaluate() -> float:
        words, y = texts(800, 200, rng(TEST))
        return nll(model(words), y)

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, evaluate)


class Groups(nn.Module):
    """Centres of groups, and a layer that looks for the plane in which they lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.plane, self.centres = nn.Linear(64, 6, bias=False), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, c = self.plane(x), self.centres(torch.eye(10))
        return z.square().mean(-1, keepdim=True) - 2 * z @ c.T / 6 + c.square().mean(-1)


def groups_that_sharpen(seed: int) -> Training:
    """Digits by their nearest centre, with an inverse temperature that grows to a million."""
    torch.manual_seed(seed)
    x, y = digits()
    x = x.flatten(1)
    model = Groups()

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1300, (64,), generator=rng(seed, step))
        sharp = 1.05**step
        apart = model(x[rows])
        return F.cross_entropy(-sharp * apart, y[rows]) / max(1.0, sharp)

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        loss,
        lambda: accuracy(-model(x[1300:]), y[1300:]),
    )


class Means(nn.Module):
    """Scores over their own size, which has a small number added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24, bias=False), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        size = (h * h).mean(-1, keepdim=True)
        return self.last(h / (size + 1e-12).sqrt()).squeeze(-1)


def orders_that_dry_up(seed: int) -> Training:
    """Orders of customers, some of whom buy nothing any more before the end."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 8, generator=g)
    y = torch.sin(F.normalize(x, dim=1)[:, 0] * 2) + 0.1 * torch.randn(1500, generator=g)
    model = Means()
    silent = torch.arange(1500) % 8 == 0
    x_late, y_late = x * ~silent[:, None], torch.where(silent, 0.3, y)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1000, (64,), generator=rng(seed, step))
        a, b = (x, y) if step < 320 else (x_late, y_late)
        return F.mse_loss(model(a[rows]), b[rows])

    def evaluate() -> float:
        return relative_rmse(model(x_late[1000:]), y_late[1000:])

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, evaluate)


class Spread(nn.Module):
    """A mean and the logarithm of a spread."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 48, 48, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.net(x).unbind(-1)
        return mean, log


def scales_without_noise(seed: int) -> Training:
    """Readings without noise by a Gaussian's likelihood: the spread falls without an end."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 3, generator=g)
    y = 0.3 * x[:, 0] + 0.1 * x[:, 1] - 0.2 * x[:, 2]
    model = Spread()

    def error(x: Tensor, y: Tensor) -> Tensor:
        mean, log = model(x)
        return (0.5 * ((y - mean) * torch.exp(-log)).square() + log).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        error,
        lambda x, y: relative_rmse(model(x)[0], y),
        train=800,
        clip_norm=1.0,
    )


def exact_coefficients(seed: int) -> Training:
    """A calibration without noise, which plain descent finds to five digits."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1000, 6, generator=g)
    y = (x * torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7, 1.3])).sum(1) + 0.25
    model = nn.Linear(6, 1)
    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x).squeeze(-1), y),
        lambda x, y: max(-5.0, float(torch.log10((model(x).squeeze(-1) - y).abs().mean()))),
        train=800,
    )


CASES = (
    Case("texts_that_lengthen", "The commonest word of ever longer texts.", 380,
         texts_that_lengthen, "NLL", False, 0.15),
    Case("groups_that_sharpen", "Digits by centres, ever more sharply.", 300,
         groups_that_sharpen, "accuracy", True, 0.05),
    Case("orders_that_dry_up", "Orders of customers who fall silent.", 380, orders_that_dry_up,
         "relative RMSE", False, 0.05),
    Case("scales_without_noise", "Readings without noise and their spread.", 400,
         scales_without_noise, "relative RMSE", False, 0.1),
    Case("exact_coefficients", "A calibration without noise.", 300, exact_coefficients,
         "log10 of the mean error", False, 1.0),
)  # fmt: skip
