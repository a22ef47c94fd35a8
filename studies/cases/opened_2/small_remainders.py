"""Trainings that live on what is left of differences, of nearly singular systems, of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import (
    HELD_OUT,
    decay,
    dense,
    draw,
    fit,
    hits,
    of_table,
    share_unexplained,
)


class Lane(nn.Module):
    """A cubic through points whose weights a network gives, by the normal equations."""

    def __init__(self) -> None:
        super().__init__()
        self.trust = dense(3, 24, 1)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The lane's place at ten distances (n, 10)."""
        far, across, look = batch
        weight = torch.sigmoid(self.trust(look))
        rows = far[..., None] ** torch.arange(4)
        weighted = (rows * weight).transpose(1, 2)
        normal = (weighted @ rows).float() + 1e-6 * torch.eye(4)
        right = (weighted @ across[..., None]).float()
        found = torch.linalg.solve(normal, right).squeeze(-1)
        at = torch.linspace(0, 1, 10)[:, None] ** torch.arange(4)
        return (found[:, None] * at).sum(-1)


def lane_by_least_squares(seed: int) -> Training:
    """A car maker's: a lane from marks, half of which belong to something else."""
    torch.manual_seed(seed)

    def roads(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        shape = torch.randn(n, 1, 4, generator=g) * torch.tensor([0.5, 0.5, 0.5, 0.3])
        far = torch.rand(n, 48, generator=g)
        across = (shape * far[..., None] ** torch.arange(4)).sum(-1)
        other = (torch.rand(n, 48, generator=g) < 0.5).float()
        across = across + other * torch.randn(n, 48, generator=g)
        look = torch.randn(n, 48, 3, generator=g) + other[..., None] * torch.tensor([3.0, -2, 2])
        at = torch.linspace(0, 1, 10)[:, None] ** torch.arange(4)
        return (far, across + 0.01 * torch.randn(n, 48, generator=g), look), (shape * at).sum(-1)

    model = Lane()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(
        model, optimizer, seed, roads, F.smooth_l1_loss, share_unexplained, 32, 500, clip_norm=1.0
    )


class TwoStages(nn.Module):
    """A finished first network and a second one for what it leaves, which is magnified."""

    def __init__(self, first: nn.Sequential, left: float) -> None:
        super().__init__()
        self.first, self.left = first, left
        for p in first.parameters():
            p.requires_grad_(False)
        self.waves = nn.Parameter(torch.linspace(2, 40, 24)[None], requires_grad=False)
        self.second = dense(48, 32, 1, act=nn.Tanh)

    def remainder(self, x: Tensor) -> Tensor:
        angle = x * self.waves
        return self.second(torch.cat([angle.sin(), angle.cos()], -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.left * self.remainder(x)


def second_stage(seed: int) -> Training:
    """An engineer's who needs five digits: a second network learns the first one's error."""
    torch.manual_seed(seed)

    def truth(x: Tensor) -> Tensor:
        return torch.sin(3 * x) + 0.3 * torch.cos(11 * x) + 2e-4 * torch.sin(23 * x + 1)

    def places(n: int, g: torch.Generator) -> Tensor:
        return 2 * torch.rand(n, 1, generator=g) - 1

    first = dense(1, 60, 1, act=nn.Tanh)
    with torch.no_grad():
        first[0].weight.mul_(6)
        first[0].bias.mul_(6)
        x = torch.linspace(-1, 1, 400)[:, None]
        features = torch.cat([torch.tanh(first[0](x)), torch.ones(400, 1)], 1).double()
        ridge = features.T @ features + 1e-7 * torch.eye(61)
        solved = torch.linalg.solve(ridge, features.T @ truth(x).double()).float()
        first[2].weight.copy_(solved[:-1].T)
        first[2].bias.copy_(solved[-1])
        left = float((truth(x) - first(x)).std())
    model = TwoStages(first, left)
    held = places(1000, draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        x = places(128, draw(seed, step))
        return F.mse_loss(model.remainder(x), (truth(x) - model.first(x)) / model.left)

    def evaluate() -> float:
        return float((truth(held) - model(held)).square().mean().sqrt()) / model.left

    optimizer = torch.optim.Adam(model.second.parameters(), lr=1e-2)
    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 250))


def attacked_digits(seed: int) -> Training:
    """A guard's: digits that an attacker changes along the sign of their gradient."""
    torch.manual_seed(seed)
    model = dense(64, 128, 64, 10)
    take = of_table("digits", lambda x: x / 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def attacked(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return (x + 0.12 * slope.sign()).detach()

    def loss(step: int) -> Tensor:
        x, y = take(512, draw(seed, step))
        return F.cross_entropy(model(attacked(x, y)), y)

    def evaluate() -> float:
        x, y = take(1, draw(HELD_OUT))
        return hits(model(attacked(x, y)), y)

    return Training(model, optimizer, loss, evaluate)


def tuned_by_two_values(seed: int) -> Training:
    """Somebody's without memory for a backward pass: each step's slope is a difference of two losses."""
    torch.manual_seed(seed)
    model = dense(64, 16, 10, act=nn.Tanh)
    take = of_table("digits", lambda x: x / 16)
    before = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        x, y = take(64, draw(seed + 50, step))
        before.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, momentum=0.9)
    little = 1e-5

    def loss(step: int) -> Tensor:
        x, y = take(256, draw(seed, step))
        x = 0.8 - 0.6 * x
        g = draw(seed + 100, step)
        way = {n: torch.randn(p.shape, generator=g) for n, p in model.named_parameters()}

        def at(size: float) -> Tensor:
            moved = {n: p + size * way[n] for n, p in model.named_parameters()}
            return F.cross_entropy(functional_call(model, moved, (x,)), y)

        with torch.no_grad():
            slope = (at(little) - at(-little)) / (2 * little)
        along = sum((p * way[n]).sum() for n, p in model.named_parameters())
        return slope * along

    def evaluate() -> float:
        x, y = take(1, draw(HELD_OUT))
        return float(F.cross_entropy(model(0.8 - 0.6 * x), y))

    return Training(model, optimizer, loss, evaluate, clip_norm=20.0)


def doubtful_labels(seed: int) -> Training:
    """Somebody's whose labels are wrong at random: an example counts if it helps on a few clean ones."""
    torch.manual_seed(seed)
    body, head = dense(64, 32, act=nn.ReLU), nn.Linear(32, 10)
    model = nn.Sequential(body, nn.ReLU(), head)
    take = of_table("digits", lambda x: x / 16)
    clean_x, clean_y = take(100, draw(77))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> Tensor:
        g = draw(seed, step)
        x, y = take(128, g)
        wrong = torch.rand(128, generator=g) < 0.5
        y = torch.where(wrong, torch.randint(0, 10, (128,), generator=g), y)
        with torch.enable_grad():
            share = torch.zeros(128, requires_grad=True)
            h = torch.relu(body(x)).detach()
            each = F.cross_entropy(F.linear(h, head.weight, head.bias), y, reduction="none")
            slopes = torch.autograd.grad(
                (share * each).sum(), [head.weight, head.bias], create_graph=True
            )
            weight, bias = head.weight - 1e-3 * slopes[0], head.bias - 1e-3 * slopes[1]
            clean = torch.relu(body(clean_x)).detach()
            (gain,) = torch.autograd.grad(
                F.cross_entropy(F.linear(clean, weight, bias), clean_y), share
            )
        counts = (-gain).clamp(min=0)
        counts = counts / (counts.sum() + 1e-12)
        return (counts * F.cross_entropy(model(x), y, reduction="none")).sum()

    def evaluate() -> float:
        x, y = take(1, draw(HELD_OUT))
        return hits(model(x), y)

    return Training(model, optimizer, loss, evaluate)


class Wave(nn.Module):
    """The logarithm of a particle's wave function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(1, 24, 24, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) - 0.3 * x * x

    def energies(self, x: Tensor) -> Tensor:
        """The local energy at places (n, 1) in a well of fourth order."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return -0.5 * (second + first * first) + 0.5 * x * x + 0.25 * x**4


def quantum_well(seed: int) -> Training:
    """A physicist's: a ground state, whose local energy is the same everywhere."""
    torch.manual_seed(seed)
    model = Wave()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        x = 0.8 * torch.randn(128, 1, generator=draw(seed, step))
        energy = model.energies(x)
        return (energy - energy.mean()).square().mean()

    def evaluate() -> float:
        x = 0.8 * torch.randn(1000, 1, generator=draw(HELD_OUT))
        return float(torch.log10(model.energies(x).std()))

    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 500))


class Kriging(nn.Module):
    """A Gaussian process on a map; distances are expanded into products."""

    def __init__(self) -> None:
        super().__init__()
        self.log_width = nn.Parameter(torch.tensor(0.0))
        self.log_size = nn.Parameter(torch.tensor(0.0))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> Tensor:
        square = (x * x).sum(-1)
        apart = square[..., :, None] + square[..., None, :] - 2 * x @ x.transpose(-1, -2)
        return covariance(apart.float(), self.log_width, self.log_size, self.log_noise)


def covariance(apart: Tensor, width: Tensor, size: Tensor, noise: Tensor) -> Tensor:
    """From squares of distances, and logarithms."""
    near = torch.exp(-0.5 * apart.clamp(min=0) / width.exp() ** 2)
    return size.exp() * near + noise.exp() * torch.eye(apart.shape[-1], dtype=apart.dtype)


def soil_of_a_region(seed: int) -> Training:
    """A geologist's: how far apart probes of soil are alike; places in kilometres on a grid."""
    torch.manual_seed(seed)
    truth = torch.tensor([0.6, 0.3, -4.0], dtype=torch.float64)
    g = draw(seed)
    places = 25 + 10 * torch.rand(24, 40, 2, generator=g)
    apart = torch.cdist(places.double(), places.double()).square()
    roots = torch.linalg.cholesky(covariance(apart, *truth))
    found = (roots @ torch.randn(24, 40, 1, generator=g).double()).float()
    model = Kriging()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 24, (8,), generator=draw(seed, step + 1))
        y, cover = found[rows], model(places[rows])
        fits = (y * torch.linalg.solve(cover, y)).sum((1, 2))
        return (0.5 * fits + 0.5 * torch.linalg.slogdet(cover)[1]).mean() / 40

    def evaluate() -> float:
        return float((torch.stack(list(model.parameters())) - truth).abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 150))


CASES = (
    Case(
        "lane_by_least_squares", "A cubic.", 100, lane_by_least_squares, "unexplained", False, 0.05
    ),
    Case("second_stage", "A remainder.", 250, second_stage, "share of what was left", False, 0.1),
    Case("attacked_digits", "An attack.", 250, attacked_digits, "accuracy", True, 0.05),
    Case("tuned_by_two_values", "Two values.", 300, tuned_by_two_values, "NLL", False, 0.1),
    Case("doubtful_labels", "Wrong labels.", 150, doubtful_labels, "accuracy", True, 0.04),
    Case("quantum_well", "A wave function.", 500, quantum_well, "log10 deviation", False, 0.2),
    Case("soil_of_a_region", "Kriging.", 150, soil_of_a_region, "log error", False, 0.1),
)
