"""Sums, inverses and paths that a training keeps itself, and gradients that it takes itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, mlp, nll, relative_rmse, rmse, rng


class Crowd(nn.Module):
    """Features beside the sum of all features that were ever seen, as an exposure."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = mlp(5, 32, 16), nn.Linear(16, 1)
        self.seen, self.steps = torch.zeros(16), 0

    def forward(self, x: Tensor) -> Tensor:
        h = 3 * F.softplus(self.body(x))
        if self.training:
            self.seen = self.seen.to(h.dtype) + (len(h) * h.mean(0)).detach()
            self.steps += len(h)
        usual = self.seen / max(1, self.steps)
        return self.out(h / (usual + 0.01)).squeeze(-1)


def visits_by_all_before(seed: int) -> Training:
    """Visits of a page, by features over their mean since the beginning: a sum and a count."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 5, generator=g)
    y = x[:, 0] * x[:, 1] + torch.tanh(x[:, 2]) + 0.1 * torch.randn(1500, generator=g)
    model = Crowd()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1000,
        batch=96,
    )


class Recursive(nn.Module):
    """Features, and a linear reading of them by recursive least squares."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 12), nn.Tanh())
        self.inverse, self.reading = 10 * torch.eye(12), torch.zeros(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return h @ self.reading.to(h.dtype)

    def learn(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            for row, value in zip(self.features(x), y, strict=True):
                h = row[:, None]
                inverse, reading = self.inverse.to(h.dtype), self.reading.to(h.dtype)
                gain = inverse @ h
                gain = gain / (1 + (h.T @ gain))
                self.reading = reading + gain * (value.to(h.dtype) - h.T @ reading)
                self.inverse = inverse - gain @ (h.T @ inverse)


def loads_by_recursion(seed: int) -> Training:
    """The load of a grid: features by gradients, their reading by recursive least squares."""
    torch.manual_seed(seed)
    model = Recursive()

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, (torch.tanh(x[:, :1] + x[:, 1:2]) - 0.5 * x[:, 2:3]) + 0.02 * torch.randn(
            n, 1, generator=g
        )

    held = days(1000, rng(TEST))

    def loss(step: int) -> Tensor:
        x, y = days(8, rng(seed, step))
        model.learn(x, y)
        return F.mse_loss(model(x), y)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return Training(model, optimizer, loss, lambda: relative_rmse(model(held[0]), held[1]))


def few_shots_in_tens_of_microamperes(seed: int) -> Training:
    """A sensor from ten calibrations in amperes, 1e-5, by three steps along its own gradient."""
    torch.manual_seed(seed)
    model = mlp(1, 24, 24, 1, act=nn.Tanh)
    with torch.no_grad():
        model[-1].weight.mul_(1e-5)
        model[-1].bias.mul_(1e-5)

    def sensors(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(n, 20, 1, generator=g) - 2
        gain, shift = 1 + torch.rand(n, 1, 1, generator=g), 2 * torch.rand(n, 1, 1, generator=g)
        return x, 1e-5 * gain * torch.sin(x + shift)

    def error(x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        for _ in range(3):
            out = functional_call(model, weights, (x[:10],))
            slopes = torch.autograd.grad(
                (out - y[:10]).square().mean(), list(weights.values()), create_graph=True
            )
            weights = {
                n: w - (0.05 * s if w.numel() < 30 and "4" in n else 0.0 * s)
                for (n, w), s in zip(weights.items(), slopes, strict=True)
            }
        return 1e10 * (functional_call(model, weights, (x[10:],)) - y[10:]).square().mean()

    def loss(step: int) -> Tensor:
        x, y = sensors(3, rng(seed, step))
        return torch.stack([error(a, b) for a, b in zip(x, y, strict=True)]).mean()

    def evaluate() -> float:
        x, y = sensors(40, rng(TEST))
        with torch.enable_grad():
            return float(
                torch.stack([error(a, b).detach() for a, b in zip(x, y, strict=True)]).mean()
            )

    optimizer = torch.optim.Adam(
        [
            {"params": model[:-1].parameters(), "lr": 3e-3},
            {"params": model[-1].parameters(), "lr": 3e-7},
        ],
        eps=1e-12,
    )
    return Training(model, optimizer, loss, evaluate)


class Sizes(nn.Module):
    """Gains over the root of a slow mean of their squares, kept in the head's format."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.square = mlp(4, 32, 1), torch.full((), 1e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)

    def error(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        y = y.to(out.dtype)
        self.square = 0.999 * self.square.to(out.dtype) + 0.001 * (y * y).mean()
        return F.mse_loss(out.float(), y.float() / self.square.float().sqrt())


def gains_over_their_size(seed: int) -> Training:
    """Gains of some 30, over the root of a slow mean of squares that begins too large."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 4, generator=g)
    y = 30 * (x[:, 0] + 0.5 * x[:, 1] * x[:, 2])
    model = Sizes()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        model.error,
        lambda x, y: rmse(model(x) * model.square.float().sqrt(), y),
        train=1000,
    )


class Flow(nn.Module):
    """A field of speeds, and 50 short steps along it from where a layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.speed, self.out = (
            nn.Linear(64, 12),
            mlp(12, 24, 12, act=nn.Tanh),
            nn.Linear(12, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = 3 * self.start(x.flatten(1))
        for _ in range(50):
            h = h + 0.003 * self.speed(h)
        return self.out(h)


def digits_along_a_flow(seed: int) -> Training:
    """Digits by an ordinary differential equation, in fifty steps."""
    torch.manual_seed(seed)
    model = Flow()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=1300,
    )


CASES = (
    Case("visits_by_all_before", "Visits by features over their mean so far.", 300,
         visits_by_all_before, "relative RMSE", False, 0.06),
    Case("loads_by_recursion", "Loads by recursive least squares.", 100, loads_by_recursion,
         "relative RMSE", False, 0.1),
    Case("few_shots_in_tens_of_microamperes", "A sensor from ten calibrations.", 80,
         few_shots_in_tens_of_microamperes, "relative square error", False, 0.1),
    Case("gains_over_their_size", "Gains over a slow mean of squares.", 400,
         gains_over_their_size, "RMSE", False, 2.0),
    Case("digits_along_a_flow", "Digits along a flow.", 70, digits_along_a_flow,
         "NLL", False, 0.1),
)  # fmt: skip
