"""Kernels, Gaussian processes, and what is fitted to high accuracy."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import cosine, draws, fixed, rmse, rows, table


class RadialBasis(nn.Module):
    """Radial basis functions; squared distances are made of products, as for large tables."""

    def __init__(self, centres: Tensor, width: float) -> None:
        super().__init__()
        self.centres = nn.Parameter(centres.clone())
        self.head = nn.Linear(len(centres), 1)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        inner = x @ self.centres.T
        square = (x * x).sum(1, keepdim=True) + (self.centres * self.centres).sum(1) - 2 * inner
        answer: Tensor = self.head(torch.exp(-square / (2 * self.width**2)))
        return answer


def radial_basis_on_a_map(seed: int) -> Training:
    """The height of a generated landscape; the map's coordinates are kilometres from its corner."""
    torch.manual_seed(seed)
    centres = 40 + 4 * torch.rand(36, 2, generator=fixed(70))
    model = RadialBasis(centres, 0.8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def height(x: Tensor) -> Tensor:
        return torch.sin(2 * x[:, :1]) * torch.cos(1.5 * x[:, 1:])

    def loss(index: int) -> Tensor:
        x = 40 + 4 * torch.rand(128, 2, generator=draws(seed, index))
        return F.mse_loss(model(x), height(x))

    x = 40 + 4 * torch.rand(500, 2, generator=fixed(71))
    return Training(
        model,
        optimizer,
        loss,
        rmse(model, x, height(x)),
        schedule=cosine(optimizer, 2e-2, 400),
    )


class FourierFeatures(nn.Module):
    """Random Fourier features of a kernel, and a ridge on them."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.register_buffer("waves", 0.3 * torch.randn(features, inputs, generator=fixed(72)))
        self.register_buffer("phases", 2 * math.pi * torch.rand(features, generator=fixed(73)))
        self.waves: Tensor
        self.phases: Tensor
        self.head = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.cos(F.linear(x, self.waves, self.phases)))
        return answer


def fourier_features_diabetes(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("diabetes", 150)
    y, test_y = (((t - 152) / 77).float()[:, None] for t in (y, test_y))
    model = FourierFeatures(10, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.mse_loss(model(x[chosen]), y[chosen])

    return Training(model, optimizer, loss, rmse(model, test_x, test_y))


class Process(nn.Module):
    """A sparse Gaussian process: kernel and noise are learnt by the evidence of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.log_noise = nn.Parameter(torch.tensor(-1.0))
        self.log_height = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        inner = h @ h.T
        square = inner.diagonal()
        distance = square[:, None] + square - 2 * inner
        kernel = self.log_height.exp() * torch.exp(-0.5 * distance)
        kernel = kernel.float() + (self.log_noise.exp() + 1e-4) * torch.eye(len(x))
        for jitter in (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0):  # as GPyTorch does, until it succeeds
            root, wrong = torch.linalg.cholesky_ex(kernel + jitter * torch.eye(len(x)))
            if int(wrong) == 0:
                break
        white = torch.linalg.solve_triangular(root, y, upper=False)
        answer: Tensor = (0.5 * (white**2).sum() + root.diagonal().log().sum()) / len(x)
        return answer


def process_evidence(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Process()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(40, 1, generator=generator)
        y = torch.sin(3 * x) + 0.03 * torch.randn(40, 1, generator=generator)
        return x, y

    def evaluate() -> float:
        with torch.no_grad():
            return sum(float(model(*batch(fixed(700 + i)))) for i in range(10)) / 10

    return Training(
        model,
        optimizer,
        lambda index: model(*batch(draws(seed, index))),
        evaluate,
        schedule=cosine(optimizer, 5e-2, 250),
    )


def diabetes_ridge_slow(seed: int) -> Training:
    """Linear regression on raw units of disease progression, by SGD at a decaying low rate."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("diabetes", 150)
    y, test_y = (t.float()[:, None] for t in (y, test_y))
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 32, seed, index)
        return F.smooth_l1_loss(model(x[chosen]), y[chosen], beta=50.0)

    def schedule(index: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 3.0 / (1 + index / 100)

    return Training(model, optimizer, loss, rmse(model, test_x, test_y), schedule=schedule)


CASES = (
    Case(
        "radial_basis_on_a_map",
        "Radial basis functions on a map far from its corner, generated.",
        400,
        radial_basis_on_a_map,
        "RMSE",
        False,
        0.05,
    ),
    Case(
        "fourier_features_diabetes",
        "Random Fourier features on the progression of diabetes.",
        200,
        fourier_features_diabetes,
        "RMSE in standard deviations",
        False,
        0.05,
    ),
    Case(
        "process_evidence",
        "A Gaussian process on a generated wave, by its evidence.",
        250,
        process_evidence,
        "negative log evidence a point",
        False,
        0.1,
    ),
    Case(
        "diabetes_ridge_slow",
        "Linear regression on the progression of diabetes in its own unit, by SGD.",
        1500,
        diabetes_ridge_slow,
        "RMSE",
        False,
        3.0,
    ),
)
