"""Ordinary small trainings, as tutorials have them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    accuracy,
    cosine,
    digit_batch,
    digits,
    generator,
    mlp,
    supervised,
)


def moons(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two interleaved half circles with noise; points (n, 2) and classes (n,)."""
    angle = torch.rand(count, generator=g) * torch.pi
    kind = torch.randint(0, 2, (count,), generator=g)
    x = torch.where(kind == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(kind == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.15 * torch.randn(count, 2, generator=g)
    return points, kind


def moons_mlp(seed: int) -> Training:
    torch.manual_seed(seed)
    model = mlp(2, 32, 32, 2)
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        lambda step: moons(64, generator(seed, step)),
        F.cross_entropy,
        moons(2000, generator(TEST)),
        accuracy,
    )


def digits_cnn(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        lambda step: digit_batch(seed, step, 32),
        F.cross_entropy,
        digits()[2:],
        accuracy,
    )


class Autoencoder(nn.Module):
    """Squeezes 64 pixels into 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = mlp(64, 48, 12), mlp(12, 48, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def digits_autoencoder(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Autoencoder()
    test = digits()[2].flatten(1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = digit_batch(seed, step)[0].flatten(1)
        return x, x

    return supervised(
        model,
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
        batch,
        F.mse_loss,
        (test, test),
        lambda out, y: float(F.mse_loss(out, y)),
    )


class Vae(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.down(x).chunk(2, 1)
        z = mean + noise * torch.exp(0.5 * log_variance)
        return self.up(z), mean, log_variance


def digits_vae(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Vae()

    def elbo(x: Tensor, noise: Tensor) -> Tensor:
        logits, mean, log_variance = model(x, noise)
        fit = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        prior = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (fit + prior) / len(x)

    def loss(step: int) -> Tensor:
        x = digit_batch(seed, step)[0].flatten(1)
        return elbo(x, torch.randn(len(x), 8, generator=generator(seed, -step - 1)))

    def evaluate() -> float:
        x = digits()[2].flatten(1)
        return float(elbo(x, torch.randn(len(x), 8, generator=generator(TEST))))

    return Training(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, evaluate)


class Copier(nn.Module):
    """A transformer that reverses sequences of 6 of 10 tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, width)
        self.places = nn.Parameter(0.1 * torch.randn(6, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(x) + self.places))


def reversal(seed: int, step: int, count: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 10, (count, 6), generator=generator(seed, step))
    return x, x.flip(1)


def reversing_transformer(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return supervised(
        model,
        optimizer,
        lambda step: reversal(seed, step),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        reversal(TEST, 0, 300),
        lambda out, y: float(F.cross_entropy(out.flatten(0, 1), y.flatten())),
        clip_norm=1.0,
        schedule=cosine(optimizer, 150),
    )


TEXT = (
    "the quick brown fox jumps over the lazy dog while the small cat sleeps on the warm mat and "
    "the old man reads a long book about the sea that he never saw but always loved "
) * 4
LETTERS = sorted(set(TEXT))


class Reader(nn.Module):
    """Letters to next letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 16)
        self.body = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.letters(x))[0])


def letters_gru(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Reader()
    codes = torch.tensor([LETTERS.index(c) for c in TEXT])

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = codes[starts[:, None] + torch.arange(9)]
        return rows[:, :-1], rows[:, 1:]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return windows(torch.randint(0, 300, (16,), generator=generator(seed, step)))

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        batch,
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        windows(torch.arange(310, 500)),
        lambda out, y: float(F.cross_entropy(out.flatten(0, 1), y.flatten())),
        clip_norm=1.0,
    )


class GraphNetwork(nn.Module):
    """Two graph convolutions."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        degree = adjacency.sum(1)
        self.register_buffer("mixing", adjacency / (degree[:, None] * degree[None]).sqrt())
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.mixing @ self.first(x))
        return self.mixing @ self.second(h)


def community_graph(seed: int) -> Training:
    torch.manual_seed(seed)
    g = generator(seed)
    groups = torch.arange(200) % 4
    chance = torch.where(groups[:, None] == groups[None], 0.12, 0.02)
    edges = (torch.rand(200, 200, generator=g) < chance).float().triu(1)
    features = torch.randn(200, 16, generator=g) + 0.5 * F.one_hot(groups, 16)
    model = GraphNetwork(edges + edges.T + torch.eye(200))
    known = torch.arange(200) < 60

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4),
        lambda _: (features, groups),
        lambda out, y: F.cross_entropy(out[known], y[known]),
        (features, groups),
        lambda out, y: accuracy(out[~known], y[~known]),
    )


class PointDenoiser(nn.Module):
    """Noise in a point at a time of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.linspace(0, -5, 8)))
        self.body = mlp(18, 48, 48, 2, activation=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None].float() * self.rates
        return self.body(torch.cat([x, angle.sin(), angle.cos()], 1))


def points_diffusion(seed: int) -> Training:
    torch.manual_seed(seed)
    model = PointDenoiser()
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.1, 60), 0)

    def noise_error(count: int, g: torch.Generator) -> Tensor:
        x, _ = moons(count, g)
        t = torch.randint(0, 60, (count,), generator=g)
        noise = torch.randn(count, 2, generator=g)
        a = kept[t][:, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda step: noise_error(128, generator(seed, step)),
        lambda: float(noise_error(4000, generator(TEST))),
    )


def digits_contrastive(seed: int) -> Training:
    torch.manual_seed(seed)
    model = mlp(64, 64, 16)
    _, _, images, classes = digits()

    def loss(step: int) -> Tensor:
        x = digit_batch(seed, step)[0].flatten(1)
        g = generator(seed, -step - 1)
        views = [x + 0.15 * torch.randn(x.shape, generator=g) for _ in range(2)]
        a, b = (F.normalize(model(v), dim=1) for v in views)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))

    def evaluate() -> float:
        z = F.normalize(model(images.flatten(1)), dim=1)
        near = (z @ z.T - 2 * torch.eye(len(z))).argmax(1)
        return float((classes[near] == classes).float().mean())

    return Training(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, evaluate)


class Ratings(nn.Module):
    """Users and films as factors."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(80, 6), nn.Embedding(120, 6)
        for e in (self.users, self.films):
            nn.init.normal_(e.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.films(pairs[:, 1])).sum(1)


def ratings_adagrad(seed: int) -> Training:
    torch.manual_seed(seed)
    g = generator(1)
    taste, style = torch.randn(80, 4, generator=g), torch.randn(120, 4, generator=g)
    truth = taste @ style.T / 2

    def ratings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([torch.randint(0, n, (count,), generator=g) for n in (80, 120)], 1)
        return pairs, truth[pairs[:, 0], pairs[:, 1]] + 0.1 * torch.randn(count, generator=g)

    model = Ratings()
    return supervised(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.2),
        lambda step: ratings(256, generator(seed, step)),
        F.mse_loss,
        ratings(4000, generator(TEST)),
        lambda out, y: math.sqrt(float(F.mse_loss(out, y))),
    )


CASES = (
    Case("moons_mlp", "An MLP on two half circles.", 250, moons_mlp, "accuracy", True, 0.02),
    Case("digits_cnn", "A CNN with batch norm on digits.", 150, digits_cnn, "accuracy", True, 0.02),
    Case(
        "digits_autoencoder",
        "An autoencoder of digits, by RMSprop.",
        300,
        digits_autoencoder,
        "mean square error",
        False,
        0.003,
    ),
    Case("digits_vae", "A variational autoencoder.", 250, digits_vae, "negative ELBO", False, 0.4),
    Case(
        "reversing_transformer",
        "A transformer that reverses sequences.",
        150,
        reversing_transformer,
        "cross-entropy",
        False,
        0.05,
    ),
    Case("letters_gru", "A GRU that reads letters.", 150, letters_gru, "cross-entropy", False, 0.1),
    Case("community_graph", "A graph network.", 100, community_graph, "accuracy", True, 0.05),
    Case("points_diffusion", "A denoiser of points.", 300, points_diffusion, "error", False, 0.03),
    Case(
        "digits_contrastive",
        "Digits told apart by contrast alone.",
        200,
        digits_contrastive,
        "accuracy of the nearest neighbour",
        True,
        0.03,
    ),
    Case("ratings_adagrad", "Ratings by factors.", 250, ratings_adagrad, "RMSE", False, 0.05),
)
