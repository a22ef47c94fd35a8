"""Metric and contrastive learning, prototypes, angles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, digits, draws, perceptron, rows, table


class Tied(nn.Module):
    """Views of a digit as points on a sphere, and the contrast of two views (SimCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.encoder(x), dim=-1)


def nearest_neighbours(model: nn.Module) -> float:
    """The share of test digits whose nearest training digit has the same label."""
    x, y, test_x, test_y = digits()
    with torch.no_grad():
        found = torch.cdist(model(test_x), model(x)).argmin(1)
    return float((y[found] == test_y).float().mean())


def contrast_of_views(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, _, _ = digits()
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        first = torch.randint(len(x), (64,), generator=generator)
        same = (y[first][:, None] == y).float()
        second = torch.multinomial(same, 1, generator=generator)[:, 0]
        noise = 0.1 * torch.randn(2, 64, 64, generator=generator)
        a, b = model(x[first] + noise[0]), model(x[second] + noise[1])
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(64))

    return Training(model, optimizer, loss, lambda: nearest_neighbours(model))


class ArcHead(nn.Module):
    """Logits with an angular margin at the label (ArcFace)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 16)
        self.centres = nn.Parameter(torch.randn(10, 16))

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        h = F.normalize(self.encoder(x), dim=-1)
        cosine = F.linear(h, F.normalize(self.centres, dim=-1))
        if label is None:
            return cosine
        angle = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
        margin = 0.3 * F.one_hot(label, 10)
        return 16 * torch.cos(angle + margin)


def angular_margin(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = ArcHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen], y[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


class Prototypes(nn.Module):
    """Logits are the negative squared distances to a prototype of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(3, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return -((x[:, None] - self.prototypes) ** 2).sum(-1)


def iris_prototypes(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("iris", 50)
    model = Prototypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y))


class Ball(nn.Module):
    """Where classes lie in the Poincaré ball: distances grow without bound towards its rim."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 48, 3)
        self.centres = nn.Linear(3, 10, bias=False)

    def project(self, v: Tensor) -> Tensor:
        length = v.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        answer: Tensor = torch.tanh(length).to(v.dtype) * v / length
        return answer

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(self.encoder(x))
        centre = self.project(self.centres.weight)
        inside = F.linear(h, centre)
        square, squares = (h * h).sum(-1, keepdim=True), (centre * centre).sum(-1)
        gap = square + squares - 2 * inside
        stretched = 1 + 2 * gap / ((1 - square) * (1 - squares)).clamp(min=1e-6)
        return -torch.acosh(stretched.clamp(min=1 + 1e-6))


def poincare_ball(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = Ball()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(4 * model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, accuracy(model, test_x, test_y), clip_norm=1.0)


CASES = (
    Case(
        "contrast_of_views",
        "Digits of one label attract each other among 64, at a temperature of 0.1.",
        200,
        contrast_of_views,
        "accuracy of the nearest neighbour",
        True,
        0.02,
    ),
    Case(
        "angular_margin",
        "Digits with an angular margin: arc cosine of a clamped cosine.",
        300,
        angular_margin,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "iris_prototypes",
        "One prototype for each kind of iris, by SGD.",
        400,
        iris_prototypes,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "poincare_ball",
        "Digits in a hyperbolic ball of three dimensions.",
        300,
        poincare_ball,
        "accuracy",
        True,
        0.04,
    ),
)
