"""Linear algebra inside a model: solvers, determinants, correlated inputs, high frequencies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, cosine, digits, draws, fixed, perceptron, rmse, rows


class Mahalanobis(nn.Module):
    """Whether sensors that see nearly the same disagree, by the inverse of their covariance."""

    def __init__(self, precision: Tensor) -> None:
        super().__init__()
        self.register_buffer("precision", precision)
        self.precision: Tensor
        self.middle = nn.Parameter(torch.zeros(len(precision)))
        self.net = perceptron(1, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.middle
        distance = ((x @ self.precision) * x).sum(1, keepdim=True)
        logits: Tensor = self.net(torch.log(distance.clamp(min=1e-3)))
        return logits


def sensors_that_disagree(seed: int) -> Training:
    torch.manual_seed(seed)
    precision = torch.linalg.inv(torch.ones(5, 5) + 1e-4 * torch.eye(5))
    model = Mahalanobis(precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        broken = torch.randint(2, (size,), generator=generator)
        common = torch.randn(size, 1, generator=generator)
        noise = 0.01 * torch.randn(size, 5, generator=generator)
        return common + noise * (1 + 3 * broken[:, None]), broken

    def loss(index: int) -> Tensor:
        x, broken = batch(draws(seed, index), 128)
        return F.cross_entropy(model(x), broken)

    evaluate = accuracy(model, *batch(fixed(140), 1000))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 250))


class RidgeHead(nn.Module):
    """A ridge regression on learnt features, solved anew for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.features = perceptron(1, 40, 16, activation=nn.Tanh)

    def forward(self, x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
        h = self.features(x)
        normal = (h.transpose(1, 2) @ h).float() + 1e-3 * torch.eye(16)
        weights = torch.linalg.solve(normal, (h.transpose(1, 2) @ y).float())
        answer: Tensor = self.features(asked) @ weights
        return answer


def waves_by_ridge_head(seed: int) -> Training:
    """Waves of any phase and height from ten of their points."""
    torch.manual_seed(seed)
    model = RidgeHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
        phase = 2 * math.pi * torch.rand(size, 1, 1, generator=generator)
        height = 0.5 + torch.rand(size, 1, 1, generator=generator)
        x = 4 * torch.rand(size, 20, 1, generator=generator) - 2
        y = height * torch.sin(2 * x + phase)
        return x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]

    def error(generator: torch.Generator, size: int) -> Tensor:
        x, y, asked, wanted = batch(generator, size)
        return F.mse_loss(model(x, y, asked), wanted)

    def evaluate() -> float:
        with torch.no_grad():
            return math.sqrt(float(error(fixed(141), 200)))

    return Training(
        model,
        optimizer,
        lambda index: error(draws(seed, index), 16),
        evaluate,
        clip_norm=1.0,
        schedule=cosine(optimizer, 5e-3, 300),
    )


class CodingRate(nn.Module):
    """Features on a sphere, and the logarithm of how much room they take (rate reduction)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.encoder(x), dim=-1)

    def rate(self, h: Tensor) -> Tensor:
        gram = (h.T @ h).float() * (12 / (0.25 * len(h)))
        answer: Tensor = 0.5 * torch.logdet(torch.eye(12) + gram)
        return answer


def digits_by_rate_reduction(seed: int) -> Training:
    """Classes take little room, all together much; a test digit gets its nearest class mean."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = CodingRate()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 100, seed, index)
        h, label = model(x[chosen]), y[chosen]
        parts = [len(h[label == c]) / 100 * model.rate(h[label == c]) for c in label.unique()]
        return torch.stack(parts).sum() - model.rate(h)

    def evaluate() -> float:
        with torch.no_grad():
            h = model(x)
            means = torch.stack([h[y == c].mean(0) for c in range(10)])
            found = torch.cdist(model(test_x), means).argmin(1)
        return float((found == test_y).float().mean())

    return Training(model, optimizer, loss, evaluate)


class HighFrequencies(nn.Module):
    """A sound by time: Fourier features of many frequencies, taken by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2 * math.pi * 25 * torch.randn(1, 64, generator=fixed(142)))
        self.waves: Tensor
        self.net = perceptron(128, 48, 1)

    def forward(self, t: Tensor) -> Tensor:
        angle = t @ self.waves
        sound: Tensor = self.net(torch.cat([angle.sin(), angle.cos()], 1))
        return sound


def sound_by_fourier_features(seed: int) -> Training:
    """A chord that lasts two seconds; the tones are 31, 39 and 47 hertz."""
    torch.manual_seed(seed)
    model = HighFrequencies()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def chord(t: Tensor) -> Tensor:
        tones = (torch.sin(2 * math.pi * f * t) for f in (31, 39, 47))
        return torch.stack(list(tones)).sum(0) / 2 * torch.exp(-t / 2)

    def loss(index: int) -> Tensor:
        t = 2 * torch.rand(256, 1, generator=draws(seed, index))
        return F.mse_loss(model(t), chord(t))

    t = 2 * torch.rand(1000, 1, generator=fixed(143))
    return Training(
        model, optimizer, loss, rmse(model, t, chord(t)), schedule=cosine(optimizer, 1e-2, 300)
    )


CASES = (
    Case(
        "sensors_that_disagree",
        "Broken ones among generated sensors that see the same, by Mahalanobis' distance.",
        250,
        sensors_that_disagree,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "waves_by_ridge_head",
        "Generated waves from ten points, by a ridge regression on learnt features.",
        300,
        waves_by_ridge_head,
        "RMSE",
        False,
        0.1,
    ),
    Case(
        "digits_by_rate_reduction",
        "Digits by the logarithm of a determinant: the rate reduction of features.",
        200,
        digits_by_rate_reduction,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "sound_by_fourier_features",
        "A generated chord by time, through Fourier features of high frequencies.",
        300,
        sound_by_fourier_features,
        "RMSE",
        False,
        0.1,
    ),
)
