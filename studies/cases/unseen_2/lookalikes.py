"""Trainings that are written with care for sizes, in fields where others are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    mlp,
    product,
    relative_rmse,
    rng,
    supervised,
)


class Pushed(nn.Module):
    """Moves points."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2, 32, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def flocks_by_log_transport(seed: int) -> Training:
    """A flock is moved onto another; transport by Sinkhorn's scaling of logarithms."""
    torch.manual_seed(seed)
    model = Pushed()

    def flocks(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, generator=g)
        side = torch.sign(torch.randn(n, 1, generator=g))
        return x, 0.4 * torch.randn(n, 2, generator=g) + 1.5 * torch.cat([side, 0.5 * side], -1)

    def cost(x: Tensor, y: Tensor) -> Tensor:
        apart = (x[:, None] - y).square().sum(-1)
        near, u, v = -apart / 0.1, torch.zeros(len(x), 1), torch.zeros(1, len(y))
        for _ in range(10):
            u = -torch.logsumexp(near + v, 1, keepdim=True)
            v = -torch.logsumexp(near + u, 0, keepdim=True)
        return (torch.exp(near + u + v) * apart).sum() / len(x)

    held = flocks(200, rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        x, y = flocks(64, rng(seed, step))
        return cost(model(x), y)

    return Training(model, optimizer, loss, lambda: float(cost(model(held[0]), held[1])))


class Field(nn.Module):
    """Density and colour along rays through a flat world."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(10, 48, 2)

    def forward(self, rays: Tensor) -> Tensor:
        """Colours (n,) of rays (n, 4): start and direction."""
        t = torch.linspace(0.2, 3.0, 16)
        at = rays[:, None, :2] + t[:, None] * rays[:, None, 2:]
        waves = [f(k * at) for k in (1, 3) for f in (torch.sin, torch.cos)]
        out = self.body(torch.cat([at, *waves], -1))
        density = F.softplus(out[..., 0])
        let = torch.exp(-density * 0.187)
        passed = torch.cumprod(F.pad(let[:, :-1], (1, 0), value=1.0), 1)
        return (passed * (1 - let) * torch.sigmoid(out[..., 1])).sum(-1)


def rays_through_a_flat_world(seed: int) -> Training:
    """Two discs, seen along rays."""
    torch.manual_seed(seed)
    model = Field()

    def rays(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        way = 6.2832 * torch.rand(n, generator=g)
        start = 1.6 * torch.stack([way.cos(), way.sin()], -1)
        goal = 1.2 * torch.rand(n, 2, generator=g) - 0.6
        ray = torch.cat([start, F.normalize(goal - start, dim=-1)], -1)
        t = torch.linspace(0.2, 3.0, 64)
        at = ray[:, None, :2] + t[:, None] * ray[:, None, 2:]
        first = (at - torch.tensor([0.4, 0.0])).norm(dim=-1) < 0.35
        second = (at + torch.tensor([0.4, 0.1])).norm(dim=-1) < 0.3
        thick = 6.0 * (first | second).float()
        let = torch.exp(-thick * 2.8 / 63)
        passed = torch.cumprod(F.pad(let[:, :-1], (1, 0), value=1.0), 1)
        return ray, (passed * (1 - let) * torch.where(first, 0.9, 0.3)).sum(-1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, rays, F.mse_loss, relative_rmse, 128, 1000)


class Corridor(nn.Module):
    """A policy and a value by place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.worth = mlp(6, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return torch.log_softmax(self.act(h), -1), self.worth(h).squeeze(-1)


def steering_by_actor_and_critic(seed: int) -> Training:
    """Advantage actor-critic on one-step choices whose worth depends on six numbers."""
    torch.manual_seed(seed)
    model = Corridor()
    worth = torch.randn(6, 3, generator=rng(91)) / 2

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        x, dice = torch.randn(128, 6, generator=g), torch.rand(128, 1, generator=g)
        log_p, value = model(x)
        action = (log_p.detach().exp().cumsum(-1) < dice).sum(-1, keepdim=True).clamp(max=2)
        gain = torch.tanh(product(x, worth)).gather(1, action)[:, 0]
        gain = gain + 0.1 * torch.randn(128, generator=g)
        ahead = (gain - value).detach()
        spread = -(log_p.exp() * log_p).sum(-1).mean()
        policy = -(log_p.gather(1, action)[:, 0] * ahead).mean()
        return policy + 0.5 * F.mse_loss(value, gain) - 0.01 * spread

    held = torch.randn(2000, 6, generator=rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def evaluate() -> float:
        best = model(held)[0].argmax(-1, keepdim=True)
        return float(torch.tanh(product(held, worth)).gather(1, best).mean())

    return Training(model, optimizer, loss, evaluate)


class Genes(nn.Module):
    """A variational autoencoder of counts, whose depth is known."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(100, 32, 8), mlp(4, 32, 100)

    def forward(self, counts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(torch.log1p(counts)).float().chunk(2, -1)
        z = mean + torch.exp(0.5 * log_var) * noise
        rate = torch.softmax(self.decode(z), -1) * counts.sum(-1, keepdim=True)
        return rate, mean, log_var


def counted_genes(seed: int) -> Training:
    """Counts of a hundred genes in cells of three kinds."""
    torch.manual_seed(seed)
    model = Genes()
    kinds = torch.softmax(1.5 * torch.randn(3, 100, generator=rng(92)), -1)

    def cells(n: int, g: torch.Generator) -> Tensor:
        kind = torch.randint(0, 3, (n,), generator=g)
        depth = 500 + 2500 * torch.rand(n, 1, generator=g)
        return torch.poisson(kinds[kind] * depth, generator=g)

    def bound(n: int, g: torch.Generator) -> Tensor:
        counts = cells(n, g)
        rate, mean, log_var = model(counts, torch.randn(n, 4, generator=g))
        fit = F.poisson_nll_loss(rate, counts, log_input=False, full=False, eps=1e-6)
        return fit - 0.005 * (1 + log_var - mean.square() - log_var.exp()).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(
        model,
        optimizer,
        lambda i: bound(64, rng(seed, i)),
        lambda: float(bound(1000, rng(TEST))),
    )


class Springs(nn.Module):
    """Springs between bodies, of one learned law; simulated from place and speed."""

    def __init__(self) -> None:
        super().__init__()
        self.law = mlp(1, 16, 1, act=nn.Tanh)

    def forward(self, start: Tensor) -> Tensor:
        x, v = start.chunk(2, -1)
        for _ in range(8):
            apart = x[:, None] - x[:, :, None]
            far = (apart.square().sum(-1, keepdim=True) + 1e-4).sqrt()
            v = v + 0.1 * (self.law(far) * apart).sum(2)
            x = x + 0.1 * v
        return x


def bodies_on_springs(seed: int) -> Training:
    """The law of a force between five bodies, by where they are a moment later."""
    torch.manual_seed(seed)
    model = Springs()

    def starts(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.randn(n, 5, 4, generator=g)
        x, v = start.chunk(2, -1)
        for _ in range(8):
            apart = x[:, None] - x[:, :, None]
            far = (apart.square().sum(-1, keepdim=True) + 1e-4).sqrt()
            v = v + 0.1 * ((1 - 1.0 / (0.5 + far)) * apart).sum(2)
            x = x + 0.1 * v
        return start, x

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, starts, F.mse_loss, relative_rmse, 32, 300)


class Clean(nn.Module):
    """Guesses what is clean from what is noisy, by way of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 48, 48, 2, act=nn.SiLU)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, level = batch
        noise = self.body(torch.cat([x, level.log(), level], -1))
        keep = (1 - level.square()).sqrt()
        return (x - level * noise) / keep


def diffusion_to_the_very_end(seed: int) -> Training:
    """A diffusion model that names the clean point even where almost all is noise."""
    torch.manual_seed(seed)
    model = Clean()

    def points(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        way = 6.2832 * torch.rand(n, 1, generator=g)
        clean = torch.cat([way.cos(), 0.3 * way.sin()], -1)
        keep = 0.01 + 0.98 * torch.rand(n, 1, generator=g)
        level = (1 - keep.square()).sqrt()
        return (keep * clean + level * torch.randn(n, 2, generator=g), level), clean

    def bounded(out: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(out, y)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return supervised(
        model, optimizer, seed, points, bounded, lambda o, y: float(bounded(o, y)), 128, 4000
    )


CASES = (
    Case(
        "flocks_by_log_transport",
        "A map of flocks, trained by transport in logarithms.",
        80,
        flocks_by_log_transport,
        "cost",
        False,
        0.05,
    ),
    Case(
        "rays_through_a_flat_world",
        "Density and colour of a flat world from rays.",
        120,
        rays_through_a_flat_world,
        "relative",
        False,
        0.05,
    ),
    Case(
        "steering_by_actor_and_critic",
        "An actor and a critic choose among three actions.",
        120,
        steering_by_actor_and_critic,
        "gain",
        True,
        0.03,
    ),
    Case(
        "counted_genes",
        "A variational autoencoder of counts of genes.",
        120,
        counted_genes,
        "bound",
        False,
        0.2,
    ),
    Case(
        "bodies_on_springs",
        "The law of a force through a simulation of five bodies.",
        80,
        bodies_on_springs,
        "relative RMSE",
        False,
        0.03,
    ),
    Case(
        "diffusion_to_the_very_end",
        "A diffusion model that names the clean point.",
        200,
        diffusion_to_the_very_end,
        "huber",
        False,
        0.02,
    ),
)
