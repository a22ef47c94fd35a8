"""Long trainings at low rates, where each step changes little."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, cosine, digits, draws, fixed, rmse, rows


class Normed(nn.Module):
    """Digits by linear layers with layer norms between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(64, 48), nn.LayerNorm(48)
        self.second, self.norm2 = nn.Linear(48, 48), nn.LayerNorm(48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.first(x)))
        logits: Tensor = self.head(F.relu(self.norm2(self.second(h))))
        return logits


def _trained(model: nn.Module, steps: int, lr: float, seed: int) -> None:
    """Train on digits before the case begins."""
    x, y, _, _ = digits()
    before = torch.optim.Adam(model.parameters(), lr=lr)
    for index in range(steps):
        chosen = rows(len(x), 64, seed, 500_000 + index)
        before.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        before.step()
    model.zero_grad()


def norms_tuned_for_inverted_digits(seed: int) -> Training:
    """Only the norms' scales and shifts are tuned, when white and black are exchanged."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = Normed()
    _trained(model, 150, 3e-3, seed)
    for part in (model.first, model.second, model.head):
        part.requires_grad_(requires_grad=False)
    tuned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(tuned, lr=3e-4)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(1 - x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, 1 - test_x, test_y))


class Gains(nn.Module):
    """A gain for each of sixteen channels of an instrument, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def gains_of_channels(seed: int) -> Training:
    """Gains between 0.95 and 1.05 are found by slow steps, for the noise is large."""
    torch.manual_seed(seed)
    model = Gains()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    truth = 0.95 + 0.1 * torch.rand(16, generator=fixed(150))

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        x = torch.randn(32, 16, generator=generator)
        noise = 0.3 * torch.randn(32, 16, generator=generator)
        return F.mse_loss(model(x), truth * x + noise)

    x = torch.randn(400, 16, generator=fixed(151))
    return Training(model, optimizer, loss, rmse(model, x, truth * x))


class DigitStrokes(nn.Module):
    """A small convolutional network without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv2(F.relu(self.conv1(x.view(-1, 1, 8, 8)))))
        logits: Tensor = self.head(h.flatten(1))
        return logits


def noisy_digits_by_slow_momentum(seed: int) -> Training:
    """A trained network gets used to noise, by SGD with momentum at a rate of 1e-4."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = DigitStrokes()
    _trained(model, 150, 3e-3, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        noise = 0.5 * torch.randn(32, 64, generator=draws(seed, 300_000 + index))
        return F.cross_entropy(model(x[chosen] + noise), y[chosen])

    noisy = test_x + 0.5 * torch.randn(test_x.shape, generator=fixed(152))
    return Training(model, optimizer, loss, accuracy(model, noisy, test_y))


def noisy_digits_by_usual_steps(seed: int) -> Training:
    """The same by Adam at a usual rate."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = DigitStrokes()
    _trained(model, 150, 3e-3, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        noise = 0.5 * torch.randn(32, 64, generator=draws(seed, 300_000 + index))
        return F.cross_entropy(model(x[chosen] + noise), y[chosen])

    noisy = test_x + 0.5 * torch.randn(test_x.shape, generator=fixed(152))
    evaluate = accuracy(model, noisy, test_y)
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 2e-3, 300))


CASES = (
    Case(
        "norms_tuned_for_inverted_digits",
        "Scales and shifts of layer norms are tuned for inverted digits, at a rate of 3e-4.",
        800,
        norms_tuned_for_inverted_digits,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "gains_of_channels",
        "Gains of generated channels near 1, by Adam at a rate of 1e-4.",
        1500,
        gains_of_channels,
        "RMSE",
        False,
        0.01,
    ),
    Case(
        "noisy_digits_by_slow_momentum",
        "A trained network gets used to noisy digits by slow SGD.",
        1000,
        noisy_digits_by_slow_momentum,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "noisy_digits_by_usual_steps",
        "A trained network gets used to noisy digits by Adam.",
        300,
        noisy_digits_by_usual_steps,
        "accuracy",
        True,
        0.03,
    ),
)
