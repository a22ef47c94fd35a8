"""Graphs and point clouds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, cosine, draws, fixed, perceptron


class GraphConvolution(nn.Module):
    """Two rounds over a normalised adjacency [N, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = F.relu(adjacency @ self.first(x))
        logits: Tensor = adjacency @ self.second(h)
        return logits


def communities(seed: int) -> Training:
    """A generated graph of four communities; forty of its nodes are labelled."""
    torch.manual_seed(seed)
    generator = fixed(50)
    label = torch.arange(160) % 4
    near = torch.where(label[:, None] == label, 0.2, 0.02)
    edges = torch.bernoulli(near, generator=generator).triu(1)
    adjacency = edges + edges.T + torch.eye(160)
    degree = adjacency.sum(1).rsqrt()
    adjacency = degree[:, None] * adjacency * degree
    x = torch.randn(160, 16, generator=generator) + 0.8 * F.one_hot(label, 16)
    model = GraphConvolution()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def loss(index: int) -> Tensor:
        return F.cross_entropy(model(x, adjacency)[:40], label[:40])

    evaluate = accuracy(lambda x: model(x, adjacency)[40:], x, label[40:])
    return Training(model, optimizer, loss, evaluate)


class SumOverNeighbours(nn.Module):
    """A hub's load from the sum over all who are linked to it, raw counts throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.message = perceptron(3, 16, 16)
        self.update = nn.Linear(16, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        load: Tensor = self.update(adjacency @ self.message(x))[:, 0]
        return load


def traffic_by_sums(seed: int) -> Training:
    """Visits to pages, generated: each page's visitors come from those that link to it."""
    torch.manual_seed(seed)
    model = SumOverNeighbours()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        adjacency = (torch.rand(100, 100, generator=generator) < 0.5).float()
        x = torch.rand(100, 3, generator=generator) * torch.tensor([3e4, 3e4, 10.0])
        return x, adjacency, adjacency @ (x[:, 0] + 0.5 * x[:, 1])

    def loss(index: int) -> Tensor:
        x, adjacency, visits = batch(draws(seed, index))
        return F.smooth_l1_loss(torch.log1p(F.softplus(model(x, adjacency))), torch.log1p(visits))

    def evaluate() -> float:
        x, adjacency, visits = batch(fixed(51))
        with torch.no_grad():
            return float(((model(x, adjacency) - visits) / visits).abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 250))


class PointNet(nn.Module):
    """A shared perceptron on each point [B, N, 3], then the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.point = perceptron(3, 32, 48)
        self.head = perceptron(48, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.point(x).amax(1))
        return logits


def shapes(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Generated point clouds [B, 48, 3] of a ball, a box, a rod or a plate, and which it is."""
    label = torch.randint(4, (size,), generator=generator)
    p = 2 * torch.rand(size, 48, 3, generator=generator) - 1
    stretch = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 0.2, 0.2], [1, 1, 0.2]])[label]
    ball = p / p.norm(dim=-1, keepdim=True)
    p = torch.where((label == 0)[:, None, None], ball, p * stretch[:, None])
    return p, label


def point_clouds(seed: int) -> Training:
    torch.manual_seed(seed)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        x, label = shapes(draws(seed, index), 32)
        return F.cross_entropy(model(x), label)

    x, label = shapes(fixed(52), 400)
    return Training(model, optimizer, loss, accuracy(model, x, label))


class SurveyedPoints(nn.Module):
    """Points in metres on a national grid; a network on edges between them, after a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3, bias=False)
        self.edge = perceptron(3, 32, 32)
        self.head = nn.Linear(32, 4)
        nn.init.eye_(self.project.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        edges = x - x.mean(1, keepdim=True)
        logits: Tensor = self.head(self.edge(edges).amax(1))
        return logits


def surveyed_points(seed: int) -> Training:
    """The same shapes where a surveyor found them: some metres wide, kilometres from the origin."""
    torch.manual_seed(seed)
    model = SurveyedPoints()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x, label = shapes(generator, size)
        where = torch.tensor([5000.0, 5000.0, 800.0]) * torch.rand(size, 1, 3, generator=generator)
        return x + 3000 + where, label

    def loss(index: int) -> Tensor:
        x, label = batch(draws(seed, index), 32)
        return F.cross_entropy(model(x), label)

    return Training(model, optimizer, loss, accuracy(model, *batch(fixed(53), 400)))


CASES = (
    Case(
        "communities",
        "A graph convolution finds the communities of a generated graph.",
        150,
        communities,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "traffic_by_sums",
        "Loads in a generated graph from sums over neighbours' counts.",
        250,
        traffic_by_sums,
        "mean relative error",
        False,
        0.05,
    ),
    Case(
        "point_clouds",
        "The shape of a generated point cloud, by a PointNet.",
        200,
        point_clouds,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "surveyed_points",
        "The shape of a generated point cloud given in metres on a grid.",
        300,
        surveyed_points,
        "accuracy",
        True,
        0.04,
    ),
)
