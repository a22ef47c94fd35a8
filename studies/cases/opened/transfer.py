"""Going on from what is trained: distillation, adapters, alternation, long gentle trainings."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import (
    accuracy,
    cosine,
    cross_entropy,
    digits,
    draws,
    fixed,
    perceptron,
    rows,
)


@cache
def teacher() -> nn.Sequential:
    """A perceptron trained on the digits; whoever uses its weights copies them."""
    x, y, _, _ = digits()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(9)
        model = perceptron(64, 96, 10)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for index in range(250):
            chosen = rows(len(x), 64, 9, index)
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model.requires_grad_(requires_grad=False)


def distillation_hot(seed: int) -> Training:
    """A small student learns a teacher's softened answers, at a temperature of 8."""
    torch.manual_seed(seed)
    x, _, test_x, test_y = digits()
    guide = teacher()
    model = perceptron(64, 24, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(index: int) -> Tensor:
        chosen = x[rows(len(x), 64, seed, index)]
        with torch.no_grad():
            wanted = F.softmax(guide(chosen) / 8, 1)
        return 64 * F.kl_div(F.log_softmax(model(chosen) / 8, 1), wanted, reduction="batchmean")

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


def distillation_warm_unscaled(seed: int) -> Training:
    """A temperature of 20 whose square the loss is not multiplied with; Adam does not mind."""
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    guide = teacher()
    model = perceptron(64, 48, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def divergence(x: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(guide(x) / temperature, 1)
        return F.kl_div(F.log_softmax(model(x) / temperature, 1), wanted, reduction="batchmean")

    def loss(index: int) -> Tensor:
        return divergence(x[rows(len(x), 128, seed, index)], 20.0)

    def evaluate() -> float:
        with torch.no_grad():
            return float(divergence(test_x, 1.0))

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


class Adapted(nn.Module):
    """A frozen perceptron with a low-rank change of each layer (LoRA)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        first, _, second = teacher()
        self.base = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 10)])
        for layer, taught in zip(self.base, (first, second), strict=True):
            layer.load_state_dict(taught.state_dict())
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.ModuleList([nn.Linear(n, rank, bias=False) for n in (64, 96)])
        self.up = nn.ModuleList([nn.Linear(rank, n, bias=False) for n in (96, 10)])
        for p in self.up.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        for i, (base, down, up) in enumerate(zip(self.base, self.down, self.up, strict=True)):
            x = base(x) + 2 * up(down(x))
            x = F.relu(x) if i == 0 else x
        return x


def adapters_for_mirrored_digits(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    x, test_x = (t.view(-1, 8, 8).flip(2).flatten(1) for t in (x, test_x))
    model = Adapted(6)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(
        model,
        optimizer,
        loss,
        accuracy(model, test_x, test_y),
        schedule=cosine(optimizer, 1e-2, 300, 20),
    )


def _fine_tuned(seed: int, optimizer_of: type[torch.optim.Optimizer], lr: float) -> Training:
    """All weights of the teacher, on digits whose brightness is inverted half-way."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    x, test_x = (0.5 + 0.5 * t - t * (torch.arange(64) % 8 < 3) for t in (x, test_x))
    model = perceptron(64, 96, 10)
    model.load_state_dict(teacher().state_dict())
    optimizer = optimizer_of(model.parameters(), lr=lr)  # type: ignore[call-arg]

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, cross_entropy(model, test_x, test_y))


def fine_tuning_adamw_low_rate(seed: int) -> Training:
    return _fine_tuned(seed, torch.optim.AdamW, 1.5e-5)


def fine_tuning_sgd_low_rate(seed: int) -> Training:
    return _fine_tuned(seed, torch.optim.SGD, 1e-3)


def fine_tuning_rmsprop_low_rate(seed: int) -> Training:
    return _fine_tuned(seed, torch.optim.RMSprop, 1e-5)


class TwoTasks(nn.Module):
    """One trunk, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.which = nn.Linear(48, 10)
        self.ink = nn.Linear(48, 1)

    def forward(self, x: Tensor, task: str) -> Tensor:
        h = self.trunk(x)
        answer: Tensor = self.which(h) if task == "which" else 1e-3 * self.ink(h)[:, 0]
        return answer


def alternating_tasks(seed: int) -> Training:
    """Which digit, and the grams of ink it takes (some thousandths), step by step in turn."""
    torch.manual_seed(seed)
    x, y, test_x, _ = digits()
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def grams(x: Tensor) -> Tensor:
        return 1e-3 * (x[:, :32].sum(1) - x[:, 32:].sum(1)) / 4

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        if index % 2 == 0:
            return F.cross_entropy(model(x[chosen], "which"), y[chosen])
        return F.mse_loss(model(x[chosen], "ink"), grams(x[chosen]))

    def evaluate() -> float:
        with torch.no_grad():
            ink = (model(test_x, "ink") - grams(test_x)).square().mean().sqrt()
        spread = grams(test_x).std()
        return float(ink / spread)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 3e-3, 400))


def counts_with_log_link(seed: int) -> Training:
    """Poisson regression of a detector's counts, up to some thousands, with spikes."""
    torch.manual_seed(seed)
    model = perceptron(3, 32, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(size, 3, generator=generator) - 1
        rate = torch.exp(5 + 2 * x[:, :1] + x[:, 1:2] * x[:, 2:3])
        return x, torch.poisson(rate, generator=generator)

    def loss(index: int) -> Tensor:
        x, counts = batch(draws(seed, index), 64)
        return F.poisson_nll_loss(model(x), counts)

    def evaluate() -> float:
        x, counts = batch(fixed(80), 500)
        with torch.no_grad():
            return float((model(x) - torch.log(counts.clamp(min=0.5))).abs().mean())

    return Training(
        model, optimizer, loss, evaluate, clip_norm=50.0, schedule=cosine(optimizer, 2e-2, 400)
    )


def scalar_temperature(seed: int) -> Training:
    """A trained classifier's answers are calibrated: one temperature and a bias for each class."""
    torch.manual_seed(seed)
    _, _, x, y = digits()
    with torch.no_grad():
        logits = 6 * teacher()(x)
    model = Calibration()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-4)

    def loss(index: int) -> Tensor:
        chosen = rows(300, 64, seed, index)
        return F.cross_entropy(model(logits[chosen]), y[chosen])

    return Training(model, optimizer, loss, cross_entropy(model, logits[300:], y[300:]))


class Calibration(nn.Module):
    """Logits over a temperature, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(1.5)))
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.log_temperature.exp() + self.bias


CASES = (
    Case(
        "distillation_hot",
        "A student learns a teacher of digits at a temperature of 8.",
        250,
        distillation_hot,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "distillation_warm_unscaled",
        "A student learns a teacher of digits at a temperature of 20, without its square.",
        300,
        distillation_warm_unscaled,
        "Kullback-Leibler divergence",
        False,
        0.05,
    ),
    Case(
        "adapters_for_mirrored_digits",
        "Low-rank adapters teach a frozen network mirrored digits.",
        300,
        adapters_for_mirrored_digits,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "fine_tuning_adamw_low_rate",
        "All weights of a classifier of digits are fine-tuned, AdamW at 1.5e-5.",
        2000,
        fine_tuning_adamw_low_rate,
        "cross entropy",
        False,
        0.05,
    ),
    Case(
        "fine_tuning_sgd_low_rate",
        "All weights of a classifier of digits are fine-tuned, SGD at 1e-3.",
        2000,
        fine_tuning_sgd_low_rate,
        "cross entropy",
        False,
        0.05,
    ),
    Case(
        "fine_tuning_rmsprop_low_rate",
        "All weights of a classifier of digits are fine-tuned, RMSprop at 1e-5.",
        2000,
        fine_tuning_rmsprop_low_rate,
        "cross entropy",
        False,
        0.05,
    ),
    Case(
        "alternating_tasks",
        "Odd steps learn which digit, even ones how much ink, in a small unit.",
        400,
        alternating_tasks,
        "error of the ink in standard deviations",
        False,
        0.1,
    ),
    Case(
        "counts_with_log_link",
        "Poisson regression of generated counts with a logarithmic link.",
        400,
        counts_with_log_link,
        "mean absolute error of the logarithm",
        False,
        0.03,
    ),
    Case(
        "scalar_temperature",
        "The temperature of a classifier's answers, by SGD at a low rate.",
        3000,
        scalar_temperature,
        "cross entropy",
        False,
        0.01,
    ),
)
