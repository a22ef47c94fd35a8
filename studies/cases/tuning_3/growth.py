"""Values that are small in the first steps, and are not later."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, cosine, mlp, nll, relative_rmse, rng


class Squares(nn.Module):
    """A layer, the squares of what it says, and a layer that reads their logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.log(1 + h * h)).squeeze(-1)


def louder_lessons(seed: int) -> Training:
    """The loudness of signals that grow a thousandfold over the training."""
    torch.manual_seed(seed)
    model = Squares()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def lesson(n: int, size: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = size * (1 + torch.rand(n, 1, generator=g)) * torch.randn(n, 6, generator=g)
        return x, torch.log(x.square().sum(1))

    def loss(step: int) -> Tensor:
        x, y = lesson(64, 10 ** (3 * step / 250), rng(seed, step))
        return F.smooth_l1_loss(model(x), y)

    def evaluate() -> float:
        x, y = lesson(500, 1000.0, rng(TEST))
        return float((model(x) - y).abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 250, 0.02))


class Prototypes(nn.Module):
    """Squared distances from an embedding to one place for each class."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.body = mlp(64, 64, 16)
        self.places, self.size = nn.Parameter(torch.randn(10, 16)), size

    def forward(self, x: Tensor) -> Tensor:
        z = self.size * self.body(x.flatten(1))
        apart = z[:, None] - self.size * self.places
        return (apart * apart).sum(-1) / self.size**2


def prototypes_that_part(seed: int, size: float = 6.0) -> Training:
    """Digits by their nearest prototype, and all prototypes are pushed apart without an end."""
    torch.manual_seed(seed)
    model = Prototypes(size)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        far = torch.pdist(model.places).mean()
        return F.cross_entropy(-model(x), y) - 0.5 * far

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        seed,
        digits(),
        loss,
        lambda x, y: accuracy(-model(x), y),
        train=1300,
    )


def prototypes_in_place(seed: int) -> Training:
    """The same prototypes in small units, which FP16 holds to the end."""
    return prototypes_that_part(seed, 0.5)


class Growing(nn.Module):
    """Eight blocks without a norm, each of which may add as much as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.norm, self.out = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.flatten(1))
        for block in self.blocks:
            h = h + F.relu(block(h)).square()
        return self.out(self.norm(h))


def squared_relus(seed: int) -> Training:
    """Digits by a way of squared ReLUs; only its end is normalized."""
    torch.manual_seed(seed)
    model = Growing()
    return fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=4e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
        clip_norm=1.0,
    )


class Pairs(nn.Module):
    """Two encoders and a temperature that is learned, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(32, 48, 24), mlp(32, 48, 24)
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x[:, :32]), dim=1), F.normalize(self.b(x[:, 32:]), dim=1)
        return self.log_scale.exp().clamp(max=100) * a @ b.T


def halves_of_digits(seed: int) -> Training:
    """The upper and the lower half of a digit find each other."""
    torch.manual_seed(seed)
    model = Pairs()

    def loss(x: Tensor, _: Tensor) -> Tensor:
        logits, own = model(x.flatten(1)), torch.arange(len(x))
        return 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own))

    return fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        seed,
        digits(),
        loss,
        lambda x, _: nll(model(x[:200].flatten(1)), torch.arange(200)),
        train=1300,
    )


def every_sixteenth_step(seed: int) -> Training:
    """A regression, and in every sixteenth step a penalty on slopes, sixteen times as heavy."""
    torch.manual_seed(seed)
    g = rng(TEST)
    inputs = torch.randn(1200, 4, generator=g)
    target = torch.sin(inputs[:, 0]) + 0.5 * inputs[:, 1] + 0.3 * torch.randn(1200, generator=g)
    model = mlp(4, 48, 48, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 300, (64,), generator=rng(seed, step))
        x = inputs[rows].clone().requires_grad_()
        out = model(x).squeeze(-1)
        error = F.mse_loss(out, target[rows])
        if step % 16 != 15:
            return error
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return error + 16 * 0.05 * slope.square().sum(1).square().mean()

    def evaluate() -> float:
        return relative_rmse(model(inputs[300:]).squeeze(-1), target[300:])

    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case(
        "louder_lessons",
        "Loudness of signals that grow a thousandfold.",
        250,
        louder_lessons,
        "mean error",
        False,
        0.2,
    ),
    Case(
        "prototypes_that_part",
        "Digits by prototypes that are pushed apart.",
        300,
        prototypes_that_part,
        "accuracy",
        True,
        0.06,
    ),
    Case(
        "prototypes_in_place",
        "Digits by the same prototypes in small units.",
        300,
        prototypes_in_place,
        "accuracy",
        True,
        0.06,
    ),
    Case(
        "squared_relus",
        "Digits by squared ReLUs without norms.",
        150,
        squared_relus,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "halves_of_digits",
        "Halves of digits find each other, with a learned temperature.",
        150,
        halves_of_digits,
        "NLL among 200",
        False,
        0.3,
    ),
    Case(
        "every_sixteenth_step",
        "A regression with a lazy penalty on slopes.",
        200,
        every_sixteenth_step,
        "relative RMSE",
        False,
        0.04,
    ),
)
