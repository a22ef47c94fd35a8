"""Gradients that are faint at their source, or become so on their way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, relative_rmse, rng


def friends_of_friends(seed: int) -> Training:
    """Who of 300 people know each other: a mean over all pairs, of which few do."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1100, 8, generator=g)
    near = x[:, :3] + 0.3 * torch.randn(1100, 3, generator=g)
    know = (torch.cdist(near, near) < 0.6).float()
    model = mlp(8, 48, 6)

    def error(rows: Tensor) -> Tensor:
        z = model(x[rows])
        apart = (z[:, None] - z).square().sum(-1)
        return F.binary_cross_entropy_with_logits(2 - apart, know[rows][:, rows])

    def loss(step: int) -> Tensor:
        return error(torch.randperm(800, generator=rng(seed, step))[:300])

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(model, optimizer, loss, lambda: float(error(torch.arange(800, 1100))))


def heights_of_a_map(seed: int) -> Training:
    """The height at 40,000 places, wanted to centimetres, by a mean over all of them."""
    torch.manual_seed(seed)
    model = mlp(2, 12, 1, act=nn.Tanh)
    with torch.no_grad():
        model[-1].weight.mul_(0.01)
        model[-1].bias.zero_()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, 2, generator=g) - 1
        return x, 0.004 * torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])

    held = places(2000, rng(TEST))

    def loss(step: int) -> Tensor:
        x, y = places(40_000, rng(seed, step))
        return F.mse_loss(model(x).squeeze(-1), y)

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12),
        loss,
        lambda: relative_rmse(model(held[0]).squeeze(-1), held[1]),
    )


class Tanhs(nn.Module):
    """A narrow way of many layers with small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(10, 24), nn.Linear(24, 1)
        self.way = nn.ModuleList(nn.Linear(24, 24) for _ in range(10))
        for layer in self.way:
            nn.init.normal_(layer.weight, std=0.04)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.way:
            h = torch.tanh(layer(h))
        return self.out(h).squeeze(-1)


def yields_by_a_long_way(seed: int) -> Training:
    """A yield by ten narrow layers, into which little comes at first."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 10, generator=g)
    y = x[:, 0] + 0.5 * x[:, 1] + 0.1 * torch.randn(1500, generator=g)
    model = Tanhs()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-14),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1000,
    )


def volts_in_picovolts(seed: int) -> Training:
    """Brain waves of some 1e-6 volts, by a squared loss in volts."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 6, generator=g)
    y = 5e-6 * torch.tanh(x[:, 0] + x[:, 1] * x[:, 2])
    model = mlp(6, 48, 1)
    with torch.no_grad():
        model[-1].weight.mul_(1e-5)
        model[-1].bias.mul_(1e-5)
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 3e-3},
            {"params": model[2].parameters(), "lr": 3e-8},
        ],
        eps=1e-25,
    )
    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x).squeeze(-1), y),
        lambda x, y: relative_rmse(model(x).squeeze(-1), y),
        train=900,
    )


def marks_by_a_weak_loss(seed: int) -> Training:
    """Digits beside a large loss on their brightness: theirs counts a millionth."""
    torch.manual_seed(seed)
    x, y = digits()
    bright = x.flatten(1).mean(1)
    body, marks, light = mlp(64, 64), nn.Linear(64, 10), mlp(64, 16, 1)
    model = nn.ModuleDict({"body": body, "marks": marks, "light": light})

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1300, (64,), generator=rng(seed, step))
        a = x[rows].flatten(1)
        told = F.cross_entropy(marks(F.relu(body(a))), y[rows])
        return 2e-6 * told + F.mse_loss(light(a).squeeze(-1), bright[rows])

    def evaluate() -> float:
        return accuracy(marks(F.relu(body(x[1300:].flatten(1)))), y[1300:])

    return Training(model, torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-14), loss, evaluate)


def sure_of_themselves(seed: int) -> Training:
    """Digits by logits that are large from the start: a saturated softmax."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    with torch.no_grad():
        model[-1].weight.mul_(60)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x.flatten(1)), y),
        lambda x, y: accuracy(model(x.flatten(1)), y),
        train=1300,
    )


def plain_descent(seed: int) -> Training:
    """Digits by plain descent with an ordinary loss, which is small at the end."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10)
    )
    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=1300,
    )


CASES = (
    Case("friends_of_friends", "Who knows whom among 300.", 60, friends_of_friends,
         "NLL", False, 0.02),
    Case("heights_of_a_map", "Heights at 40,000 places.", 80, heights_of_a_map,
         "relative RMSE", False, 0.06),
    Case("yields_by_a_long_way", "A yield by ten narrow layers.", 250, yields_by_a_long_way,
         "relative RMSE", False, 0.1),
    Case("volts_in_picovolts", "Brain waves in volts.", 200, volts_in_picovolts,
         "relative RMSE", False, 0.06),
    Case("marks_by_a_weak_loss", "Digits by a loss that counts a millionth.", 200,
         marks_by_a_weak_loss, "accuracy", True, 0.05),
    Case("sure_of_themselves", "Digits by large logits.", 150, sure_of_themselves,
         "accuracy", True, 0.04),
    Case("plain_descent", "Digits by plain descent.", 150, plain_descent, "NLL", False, 0.05),
)  # fmt: skip
