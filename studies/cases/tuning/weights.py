"""Trainings whose weights move by little steps: low rates, large weights, decay, long schedules."""

from __future__ import annotations

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
    relative_rmse,
    rmse,
    supervised,
)


def digits_low_rate(seed: int) -> Training:
    """An MLP on digits for a long time at a rate of 2e-5."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-5),
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        accuracy,
    )


def _flat(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].flatten(1), batch[1]


def digits_sgd_low_rate(seed: int) -> Training:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), lr=2e-3),
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        accuracy,
    )


def digits_sgd(seed: int) -> Training:
    """SGD as usual: many single updates are tiny, but what they add up to is not."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        accuracy,
    )


def digits_long_cosine(seed: int) -> Training:
    """The rate falls to nothing: late updates are tiny, when everything is learnt."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return supervised(
        model,
        optimizer,
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        accuracy,
        schedule=cosine(optimizer, 400),
    )


class Pendulum(nn.Module):
    """Simulates a pendulum whose length, friction and gravity are learnt from what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.gravity = nn.Parameter(torch.tensor(8.5))
        self.friction = nn.Parameter(torch.tensor(0.1))

    def forward(self, start: Tensor) -> Tensor:
        angle, speed, seen = start, torch.zeros_like(start), []
        for _ in range(8):
            speed = speed - 0.1 * (self.gravity * torch.sin(angle) + self.friction * speed)
            angle = angle + 0.1 * speed
            seen.append(angle)
        return torch.stack(seen, 1)


def pendulum_gravity(seed: int) -> Training:
    torch.manual_seed(seed)
    truth, model = Pendulum(), Pendulum()
    with torch.no_grad():
        truth.gravity.fill_(9.81)
        truth.friction.fill_(0.3)

    def swings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.rand(count, generator=g)
        with torch.no_grad():
            return start, truth(start)

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=3.5e-3),
        lambda step: swings(32, generator(seed, step)),
        F.mse_loss,
        swings(200, generator(TEST)),
        lambda *_: abs(float(model.gravity) - 9.81),
    )


class Barometer(nn.Module):
    """Gain and offset of eight sensors (kPa) after a small network for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.gain = nn.Parameter(torch.full((8,), 100.0)), nn.Parameter(torch.ones(8))
        self.rest = mlp(8, 16, 8, activation=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.offset + self.rest(x)


def sensor_offsets(seed: int) -> Training:
    torch.manual_seed(seed)
    offset = 101.3 + torch.randn(8, generator=generator(3))
    gain = 1 + 0.2 * torch.randn(8, generator=generator(4))

    def readings(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8, generator=g)
        return x, gain * x + offset + 0.05 * torch.randn(count, 8, generator=g)

    model = Barometer()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: readings(64, generator(seed, step)),
        F.mse_loss,
        readings(1000, generator(TEST)),
        rmse,
    )


class Prototypes(nn.Module):
    """Soft assignment to learnt centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.tensor([[20.0, 20.0], [24.0, 20.0], [22.0, 24.0]]))

    def forward(self, x: Tensor) -> Tensor:
        distance = ((x[:, None] - self.centres) ** 2).sum(2)
        return -torch.logsumexp(-0.5 * distance, 1)


def mixture_centres(seed: int) -> Training:
    torch.manual_seed(seed)
    truth = torch.tensor([[18.0, 19.0], [26.5, 18.0], [23.0, 26.0]])

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 3, (count,), generator=g)
        x = truth[kind] + torch.randn(count, 2, generator=g)
        return x, x

    model = Prototypes()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=6e-3),
        lambda step: points(64, generator(seed, step)),
        lambda out, _: out.mean(),
        points(3000, generator(TEST)),
        lambda out, _: float(out.mean()),
    )


class Pairs(nn.Module):
    """Two embeddings and their product."""

    def __init__(self, count: int = 100) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(count, 8), nn.Embedding(count, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.left(pairs[:, 0]) * self.right(pairs[:, 1])).sum(1)


def word_pairs(seed: int) -> Training:
    """Embeddings as torch makes them, N(0, 1), at a rate of 3e-4."""
    torch.manual_seed(seed)
    group = torch.arange(100) % 5

    def pairs(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 100, (count, 2), generator=g)
        return x, (group[x[:, 0]] == group[x[:, 1]]).float()

    model = Pairs()
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=4e-4),
        lambda step: pairs(512, generator(seed, step)),
        F.binary_cross_entropy_with_logits,
        pairs(4000, generator(TEST)),
        lambda out, y: float(F.binary_cross_entropy_with_logits(out, y)),
    )


def ridge_decay(seed: int) -> Training:
    """More weights than examples: what was never seen must decay away, 1e-4 of it in a step."""
    torch.manual_seed(seed)
    g = generator(8)
    x, direction = torch.randn(60, 120, generator=g), torch.randn(120, 1, generator=g) / 10
    y = x @ direction + 0.1 * torch.randn(60, 1, generator=g)
    model = nn.Linear(120, 1)
    nn.init.normal_(model.weight, std=0.5)
    test = torch.randn(1000, 120, generator=generator(TEST))
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.02),
        lambda _: (x, y),
        F.mse_loss,
        (test, test @ direction),
        relative_rmse,
    )


def adamw_decay(seed: int) -> Training:
    """Noise in, and only decoupled decay takes the useless weights away."""
    torch.manual_seed(seed)
    g = generator(9)
    x = torch.randn(80, 200, generator=g)
    y = x[:, :1] - x[:, 1:2] + 0.1 * torch.randn(80, 1, generator=g)
    model = nn.Linear(200, 1)
    nn.init.normal_(model.weight, std=0.2)
    test = torch.randn(1000, 200, generator=generator(TEST))
    return supervised(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2),
        lambda _: (x, y),
        F.mse_loss,
        (test, test[:, :1] - test[:, 1:2]),
        relative_rmse,
    )


def layer_norm_gains(seed: int) -> Training:
    """Gains near 1 hardly move at 5e-4; the layers around them learn all the same."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.LayerNorm(48)]
    model = nn.Sequential(*layers, nn.GELU(), nn.Linear(48, 10))
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-4),
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        accuracy,
    )


def logistic_adagrad(seed: int) -> Training:
    """Adagrad's steps shrink as it goes on."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    return supervised(
        model,
        torch.optim.Adagrad(model.parameters(), lr=1e-3),
        lambda step: _flat(digit_batch(seed, step)),
        F.cross_entropy,
        _flat(digits()[2:]),
        lambda out, y: float(F.cross_entropy(out, y)),
    )


class Orbit(nn.Module):
    """A spring constant and a mass (kg) behind measured periods."""

    def __init__(self) -> None:
        super().__init__()
        self.stiffness, self.mass = (
            nn.Parameter(torch.tensor(45.0)),
            nn.Parameter(torch.tensor(2.0)),
        )

    def forward(self, added: Tensor) -> Tensor:
        return 6.2832 * torch.sqrt((self.mass.abs() + added) / self.stiffness.abs())


def spring_constant(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Orbit()

    def periods(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        added = 3 * torch.rand(count, generator=g)
        exact = 6.2832 * torch.sqrt((1.6 + added) / 52.0)
        return added, exact + 0.01 * torch.randn(count, generator=g)

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: periods(64, generator(seed, step)),
        F.mse_loss,
        periods(10, generator(TEST)),
        lambda *_: abs(float(model.stiffness) - 52.0),
    )


def finetuned_head(seed: int) -> Training:
    """A trained body goes on at a rate of 1e-5 on turned digits."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    first = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
        x, y = _flat(digit_batch(99, step))
        first.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()

    def turned(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].transpose(2, 3).flatten(1), batch[1]

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-5),
        lambda step: turned(digit_batch(seed, step)),
        F.cross_entropy,
        turned(digits()[2:]),
        lambda out, y: float(F.cross_entropy(out, y)),
    )


CASES = (
    Case("digits_low_rate", "Digits at 2e-5.", 1200, digits_low_rate, "accuracy", True, 0.02),
    Case("digits_sgd_low_rate", "SGD at 2e-3.", 800, digits_sgd_low_rate, "accuracy", True, 0.02),
    Case("digits_sgd", "SGD as usual.", 400, digits_sgd, "accuracy", True, 0.02),
    Case("digits_long_cosine", "A falling rate.", 400, digits_long_cosine, "accuracy", True, 0.02),
    Case("pendulum_gravity", "Gravity.", 400, pendulum_gravity, "error in m/s²", False, 0.1),
    Case("sensor_offsets", "Offsets.", 500, sensor_offsets, "RMSE in kPa", False, 0.1),
    Case("mixture_centres", "Centres.", 500, mixture_centres, "−log likelihood", False, 0.1),
    Case("word_pairs", "Embeddings alone.", 500, word_pairs, "cross-entropy", False, 0.05),
    Case("ridge_decay", "Weight decay.", 1500, ridge_decay, "relative RMSE", False, 0.1),
    Case("adamw_decay", "Decoupled decay.", 1500, adamw_decay, "relative RMSE", False, 0.1),
    Case("layer_norm_gains", "Gains near 1.", 300, layer_norm_gains, "accuracy", True, 0.02),
    Case("logistic_adagrad", "Adagrad.", 500, logistic_adagrad, "cross-entropy", False, 0.05),
    Case("spring_constant", "A spring.", 600, spring_constant, "error in N/m", False, 1.0),
    Case("finetuned_head", "Fine-tuning.", 400, finetuned_head, "cross-entropy", False, 0.1),
)
