"""Classifiers on small tables and on digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import (
    accuracy,
    cosine,
    cross_entropy,
    digits,
    fixed,
    perceptron,
    rows,
    table,
)


def digits_mlp(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = perceptron(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and a linear layer on the mean over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1, stride=2)
        self.norm2 = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x.view(-1, 1, 8, 8))))
        x = F.relu(self.norm2(self.conv2(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def digits_cnn(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    measure = accuracy(model, test_x, test_y)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    def evaluate() -> float:
        model.eval()
        return measure()

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 200, 10))


class RawPixels(nn.Module):
    """Pixels from 0 to 255 as they are; the hidden layer is normalised by its root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.gain = nn.Parameter(torch.ones(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x * 255)
        h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * self.gain
        logits: Tensor = self.head(F.relu(h))
        return logits


def raw_pixels_rms_norm(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = RawPixels()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


def wine_rmsprop(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("wine", 60)
    model = perceptron(13, 24, 3, activation=nn.Tanh)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


class Focal(nn.Module):
    """The focal loss of RetinaNet on logits, for one class among few."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(logits)
        hit = p * target + (1 - p) * (1 - target)
        weight = 0.75 * target + 0.25 * (1 - target)
        entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (weight * (1 - hit) ** 2 * entropy).sum() / target.sum().clamp(min=1)


def rare_digit_focal(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = perceptron(64, 32, 1)
    focal = Focal()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 128, seed, index)
        answer: Tensor = focal(model(x[chosen])[:, 0], (y[chosen] == 8).float())
        return answer

    def evaluate() -> float:
        with torch.no_grad():
            logits = model(test_x)[:, 0]
        return float(((logits > 0) == (test_y == 8)).float().mean())

    return Training(model, optimizer, loss, evaluate)


def forget_noise_by_decay(seed: int) -> Training:
    """As many useless inputs as useful ones are forgotten by weight decay alone."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("breast_cancer", 200)
    useless = torch.randn(len(x) + 200, 60, generator=fixed(1))
    x = torch.cat([x, useless[:-200] * 0.01], 1)
    test_x = torch.cat([test_x, useless[-200:]], 1)  # a sensor that drifts away after training
    model = nn.Linear(90, 2)
    nn.init.normal_(model.weight, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.0115)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, cross_entropy(model, test_x, test_y))


def tumours_slow_logistic(seed: int) -> Training:
    """Logistic regression that forgets where it began, at a low rate."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("breast_cancer", 200)
    model = nn.Linear(30, 2)
    nn.init.normal_(model.weight, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, cross_entropy(model, test_x, test_y))


def digits_late_fine_tuning(seed: int) -> Training:
    """A network that was trained on bright digits goes on, gently, with dim ones."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = perceptron(64, 64, 10)
    before = torch.optim.Adam(model.parameters(), lr=3e-3)
    for index in range(150):
        chosen = rows(len(x), 64, seed, 100_000 + index)
        before.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        before.step()
    model.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    dim = torch.where(torch.arange(64) % 8 < 4, 1.0, 0.1)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        return F.cross_entropy(model(x[chosen] * dim), y[chosen])

    return Training(model, optimizer, loss, cross_entropy(model, test_x * dim, test_y))


CASES = (
    Case(
        "digits_mlp",
        "A perceptron on scikit-learn's digits, by momentum.",
        300,
        digits_mlp,
        "accuracy",
        True,
        0.02,
    ),
    Case(
        "digits_cnn",
        "Two convolutions with batch norm on digits, AdamW with a warm-up.",
        200,
        digits_cnn,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "raw_pixels_rms_norm",
        "Digits of 0 to 255 with a root mean square norm by hand.",
        300,
        raw_pixels_rms_norm,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "wine_rmsprop",
        "Cultivars of wine from standardised chemistry, by RMSprop.",
        300,
        wine_rmsprop,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "rare_digit_focal",
        "Is this digit an eight, by the focal loss.",
        400,
        rare_digit_focal,
        "accuracy",
        True,
        0.02,
    ),
    Case(
        "forget_noise_by_decay",
        "Logistic regression on tumours whose idle inputs only weight decay forgets.",
        3000,
        forget_noise_by_decay,
        "cross entropy",
        False,
        0.1,
    ),
    Case(
        "tumours_slow_logistic",
        "Logistic regression on tumours by SGD at 1e-3.",
        2500,
        tumours_slow_logistic,
        "cross entropy",
        False,
        0.03,
    ),
    Case(
        "digits_late_fine_tuning",
        "A trained perceptron is fine-tuned on half-dark digits at a rate of 1e-5.",
        2500,
        digits_late_fine_tuning,
        "cross entropy",
        False,
        0.03,
    ),
)
