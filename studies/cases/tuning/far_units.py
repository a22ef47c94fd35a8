"""Trainings of two losses in units far apart: a sum in a large unit, and a mean in a small one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import TEST, generator, mlp, relative_rmse, supervised
from cases.tuning.underflow import blobs


class Twin(nn.Module):
    """Two networks on the same inputs, each with the unit of its outputs."""

    def __init__(self, inputs: int, sizes: tuple[int, int], units: tuple[float, float]) -> None:
        super().__init__()
        self.units = units
        self.first, self.second = (mlp(inputs, 24, n, activation=nn.Tanh) for n in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.units[0] * self.first(x), self.units[1] * self.second(x)


def _worse(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> float:
    """The worse of two relative errors."""
    return max(relative_rmse(a, b) for a, b in zip(out, y, strict=True))


def _two_units(seed: int, units: tuple[float, float], sizes: tuple[int, int]) -> Training:
    """A sum of squares in a large unit, and a mean of squares in a small one."""
    torch.manual_seed(seed)
    model = Twin(4, sizes, units)
    mixing = [torch.randn(4, n, generator=generator(20 + n)) for n in sizes]

    def samples(count: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.randn(count, 4, generator=g)
        large, small = (u * torch.sin(x @ m) for u, m in zip(units, mixing, strict=True))
        return x, (large, small)

    def loss(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return ((out[0] - y[0]) ** 2).sum() + F.mse_loss(out[1], y[1])

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-30),
        lambda step: samples(256, generator(seed, step)),
        loss,
        samples(1000, generator(TEST)),
        _worse,
    )


def stress_and_strain(seed: int) -> Training:
    """Stresses in MPa, up to 900, by a sum; strains, parts of 10,000, by a mean."""
    return _two_units(seed, (900.0, 1e-4), (2, 32))


def depth_and_flow(seed: int) -> Training:
    """Depths in mm by a sum over pixels; flow in m/s by a mean."""
    return _two_units(seed, (2000.0, 3e-4), (1, 64))


def turnover_and_churn(seed: int) -> Training:
    """Turnover of shops in euros by a sum; daily churn by a mean over articles."""
    return _two_units(seed, (5000.0, 1e-3), (3, 256))


def two_surveys(seed: int) -> Training:
    """Even steps are of a survey in large units, by a sum; odd ones of one in small units, by a mean."""
    torch.manual_seed(seed)
    units = (1000.0, 2e-4)
    model = Twin(3, (2, 64), units)
    mixing = [torch.randn(3, n, generator=generator(30 + n)) for n in (2, 64)]

    def answers(count: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.randn(count, 3, generator=g)
        return x, (units[0] * torch.tanh(x @ mixing[0]), units[1] * torch.tanh(x @ mixing[1]))

    def loss(step: int) -> Tensor:
        x, y = answers(256, generator(seed, step))
        out = model(x)
        return F.mse_loss(out[1], y[1]) if step % 2 else ((out[0] - y[0]) ** 2).sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-30)
    x, y = answers(1000, generator(TEST))
    return Training(model, optimizer, loss, lambda: _worse(model(x), y))


class Molecule(nn.Module):
    """A trunk with two heads: an energy in J/mol, and partial charges in coulombs times 1e15."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.GELU())
        self.energy, self.charges = nn.Linear(32, 1), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return 3000 * self.energy(h), 1.6e-4 * self.charges(h)


def energy_and_charges(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Molecule()
    mixing = torch.randn(6, 49, generator=generator(51)) / 3

    def molecules(count: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.randn(count, 6, generator=g)
        y = torch.tanh(x @ mixing)
        return x, (3000 * y[:, :1], 1.6e-4 * y[:, 1:])

    def loss(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return ((out[0] - y[0]) ** 2).sum() + F.mse_loss(out[1], y[1])

    return supervised(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-30),
        lambda step: molecules(256, generator(seed, step)),
        loss,
        molecules(1000, generator(TEST)),
        _worse,
    )


class Surveyor(nn.Module):
    """A picture's brightness in large counts, and where its disc is."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(1, 4, 5, 2, 2)
        self.count, self.mask = nn.Linear(4, 1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.look(x))
        return 20000 * self.count(h.mean((2, 3))), self.mask(h)


def counts_and_masks(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Surveyor()

    def pictures(count: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, mask = blobs(count, 64, g)
        light = 0.5 + torch.rand(count, 1, 1, 1, generator=g)
        return x * light, (20000 * (x * light).abs().mean((1, 2, 3))[:, None], mask)

    def loss(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        seen = F.binary_cross_entropy_with_logits(out[1], F.max_pool2d(y[1], 2))
        return ((out[0] - y[0]) ** 2).sum() + 1e-3 * seen

    def evaluate(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> float:
        return float(F.binary_cross_entropy_with_logits(out[1], F.max_pool2d(y[1], 2)))

    return supervised(
        model,
        torch.optim.Adam(
            [
                {"params": [*model.look.parameters(), *model.count.parameters()], "lr": 5e-3},
                {"params": model.mask.parameters(), "lr": 2e-2},
            ],
            eps=1e-30,
        ),
        lambda step: pictures(8, generator(seed, step)),
        loss,
        pictures(32, generator(TEST)),
        evaluate,
    )


class ActorCritic(nn.Module):
    """A policy and the value of a state in cents."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (mlp(4, 24, n, activation=nn.Tanh) for n in (3, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.log_softmax(self.actor(x), 1), 10000 * self.critic(x)


def rewards_in_cents(seed: int) -> Training:
    """A critic by a sum of squares; an actor by gains relative to turnover, a mean."""
    torch.manual_seed(seed)
    model = ActorCritic()

    def states(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 4, generator=g)
        return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2], -x[:, 2]], 1)

    def loss(step: int) -> Tensor:
        x, gains = states(256, generator(seed, step))
        chance, value = model(x)
        returns = 10000 * gains.mean(1, keepdim=True)
        draw = torch.rand(256, 1, generator=generator(seed, -step - 1))
        action = (chance.exp().cumsum(1) < draw).sum(1).clamp(max=2)
        gain = 1e-6 * gains.gather(1, action[:, None])[:, 0]
        return ((value - returns) ** 2).sum() - (
            chance.gather(1, action[:, None])[:, 0] * gain
        ).mean()

    def evaluate() -> float:
        x, gains = states(4000, generator(TEST))
        return float(gains.gather(1, model(x)[0].argmax(1, keepdim=True)).mean())

    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-30), loss, evaluate)


class Shops(nn.Module):
    """Turnover (euros) and the share of returned goods of 60 shops in 40 weeks."""

    def __init__(self) -> None:
        super().__init__()
        self.shops, self.weeks = nn.Embedding(60, 8), nn.Embedding(40, 8)
        self.turnover, self.returned = nn.Linear(16, 1), nn.Linear(16, 24)

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([self.shops(pairs[:, 0]), self.weeks(pairs[:, 1])], 1)
        return 8000 * self.turnover(h), 5e-4 * self.returned(h)


def turnover_and_returns(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Shops()
    g = generator(53)
    shops, weeks = torch.randn(60, 25, generator=g), torch.randn(40, 25, generator=g)

    def sales(count: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pairs = torch.stack([torch.randint(0, n, (count,), generator=g) for n in (60, 40)], 1)
        y = shops[pairs[:, 0]] + weeks[pairs[:, 1]]
        return pairs, (8000 * y[:, :1], 5e-4 * y[:, 1:])

    def loss(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return ((out[0] - y[0]) ** 2).sum() + F.mse_loss(out[1], y[1])

    heads = [{"params": m.parameters(), "lr": 2e-2} for m in (model.turnover, model.returned)]
    tables = [{"params": m.parameters(), "lr": 5e-2} for m in (model.shops, model.weeks)]
    return supervised(
        model,
        torch.optim.Adam([*heads, *tables], eps=1e-30),
        lambda step: sales(256, generator(seed, step)),
        loss,
        sales(2000, generator(TEST)),
        _worse,
    )


def three_surveys(seed: int) -> Training:
    """Steps of three surveys in turn: metres by a mean, micrometres by a mean, and euros by a sum."""
    torch.manual_seed(seed)
    units = (1.0, 1e-4, 4000.0)
    models = nn.ModuleList([mlp(3, 20, n, activation=nn.Tanh) for n in (4, 64, 2)])
    mixing = [torch.randn(3, n, generator=generator(60 + n)) for n in (4, 64, 2)]

    def answers(count: int, kind: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3, generator=g)
        return x, units[kind] * torch.tanh(x @ mixing[kind])

    def loss(step: int) -> Tensor:
        kind = step % 3
        x, y = answers(256, kind, generator(seed, step))
        squares = (units[kind] * models[kind](x) - y) ** 2
        return squares.sum() if kind == 2 else squares.mean()

    def evaluate() -> float:
        tests = [answers(500, kind, generator(TEST)) for kind in range(3)]
        return max(relative_rmse(units[k] * models[k](x), y) for k, (x, y) in enumerate(tests))

    optimizer = torch.optim.Adam(models.parameters(), lr=1e-2, eps=1e-30)
    return Training(models, optimizer, loss, evaluate)


def masses_and_traces(seed: int) -> Training:
    """Masses (t) of 3 bulk goods by a sum, and traces of 100 others by a mean."""
    return _two_units(seed, (1200.0, 2e-4), (3, 100))


CASES = (
    Case("stress_and_strain", "Two units.", 150, stress_and_strain, "relative RMSE", False, 0.1),
    Case("depth_and_flow", "Two units.", 150, depth_and_flow, "relative RMSE", False, 0.1),
    Case("turnover_and_churn", "Two units.", 150, turnover_and_churn, "relative RMSE", False, 0.1),
    Case("two_surveys", "Steps of two units.", 200, two_surveys, "relative RMSE", False, 0.1),
    Case("energy_and_charges", "Molecules.", 150, energy_and_charges, "relative RMSE", False, 0.1),
    Case("counts_and_masks", "Pictures.", 80, counts_and_masks, "cross-entropy", False, 0.02),
    Case("rewards_in_cents", "Actor and critic.", 150, rewards_in_cents, "gain", True, 0.05),
    Case("turnover_and_returns", "Shops.", 150, turnover_and_returns, "relative RMSE", False, 0.1),
    Case("three_surveys", "Three units.", 240, three_surveys, "relative RMSE", False, 0.1),
    Case("masses_and_traces", "Two units.", 120, masses_and_traces, "relative RMSE", False, 0.1),
)
