"""Trainings in small units, or with a mean over very many elements."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    cosine,
    generator,
    mlp,
    relative_rmse,
    small_output,
    supervised,
)
from cases.tuning.underflow import tones


def sea_level(seed: int) -> Training:
    """Sea level (m) at 1,024 places by eight indices, parts of a millimetre; a mean over all."""
    torch.manual_seed(seed)
    g = generator(6)
    patterns = 2e-4 * torch.randn(8, 1024, generator=g)
    model = small_output(mlp(8, 24, 1024, activation=nn.Tanh))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def months(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8, generator=g)
        return x, torch.tanh(x) @ patterns

    return supervised(
        model,
        optimizer,
        lambda step: months(128, generator(seed, step)),
        F.mse_loss,
        months(500, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 300),
    )


def trading_policy(seed: int) -> Training:
    """Buy, hold or sell, by the returns of one second: thousandths of a per cent."""
    torch.manual_seed(seed)
    model = mlp(6, 32, 3, activation=nn.Tanh)

    def seconds(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6, generator=g)
        drift = torch.tanh(x[:, 0] * x[:, 1] + x[:, 2])
        return x, 1e-5 * (drift + 0.5 * torch.randn(count, generator=g))

    positions = torch.tensor([1.0, 0.0, -1.0])

    def loss(step: int) -> Tensor:
        x, returns = seconds(512, generator(seed, step))
        chance = torch.log_softmax(model(x), 1)
        draw = torch.rand(512, 1, generator=generator(seed, -step - 1))
        action = (chance.exp().cumsum(1) < draw).sum(1).clamp(max=2)
        gain = positions[action] * returns
        return -(chance.gather(1, action[:, None])[:, 0] * gain).mean()

    def evaluate() -> float:
        x, returns = seconds(4000, generator(TEST))
        return 1e5 * float((positions[model(x).argmax(1)] * returns).mean())

    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, evaluate)


class Grid(nn.Module):
    """Two rounds of messages between the 300 nodes of a power grid."""

    def __init__(self, mixing: Tensor) -> None:
        super().__init__()
        self.register_buffer("mixing", mixing)
        self.first, self.second, self.out = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mixing @ self.first(x))
        return self.out(torch.tanh(self.mixing @ self.second(h)))


def grid_voltages(seed: int) -> Training:
    """Voltages' deviations per unit, about 0.001, on all nodes of 24 days."""
    torch.manual_seed(seed)
    g = generator(7)
    edges = (torch.rand(300, 300, generator=g) < 0.02).float()
    edges = ((edges + edges.T) > 0).float() + torch.eye(300)
    mixing = edges / edges.sum(1, keepdim=True)

    def days(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 300, 2, generator=g)
        return x, 2e-3 * torch.tanh(mixing @ (mixing @ (x[..., :1] - 0.5 * x[..., 1:])) * 2)

    model = Grid(mixing)
    with torch.no_grad():
        model.out.weight.mul_(0.1)
        model.out.bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(
        model,
        optimizer,
        lambda step: days(24, generator(seed, step)),
        F.mse_loss,
        days(32, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 200),
    )


def seismic_denoiser(seed: int) -> Training:
    """Ground movement in units of g: a ten-thousandth."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv1d(1, 4, 15, padding=7, bias=False), nn.LeakyReLU(0.3)]
    model = nn.Sequential(*layers, nn.Conv1d(4, 1, 15, padding=7, bias=False))

    def shocks(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        clean = tones(count, 2048, g) / 500
        return clean + 4e-5 * torch.randn(clean.shape, generator=g), clean

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: shocks(12, generator(seed, step)),
        F.mse_loss,
        shocks(24, generator(TEST)),
        relative_rmse,
    )


class Taste(nn.Module):
    """Every user with every article."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.articles = nn.Embedding(320, 8), nn.Embedding(480, 8)
        self.bias = nn.Parameter(torch.tensor(-5.0))
        for e in (self.users, self.articles):
            nn.init.normal_(e.weight, std=0.1)

    def forward(self) -> Tensor:
        return self.users.weight @ self.articles.weight.T + self.bias


def implicit_feedback(seed: int) -> Training:
    """Who bought what: one pair in 1,000, and a mean over all 150,000 pairs."""
    torch.manual_seed(seed)
    g = generator(10)
    liking = torch.randn(320, 3, generator=g) @ torch.randn(480, 3, generator=g).T
    chance = torch.sigmoid(1.5 * liking - 9)
    model = Taste()

    def bought(g: torch.Generator) -> Tensor:
        return (torch.rand(320, 480, generator=g) < chance).float()

    held_out = bought(generator(TEST))
    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        lambda step: F.binary_cross_entropy_with_logits(model(), bought(generator(seed, step))),
        lambda: 100 * float(F.binary_cross_entropy_with_logits(model(), held_out)),
    )


def spike_rates(seed: int) -> Training:
    """Spikes of 256 neurons in bins of a millisecond, by a Poisson loss over neurons and time."""
    torch.manual_seed(seed)
    mixing = torch.randn(6, 256, generator=generator(11))
    model = mlp(6, 32, 256, activation=nn.Tanh)
    nn.init.constant_(model[-1].bias, -3.0)

    def seconds(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(512, 6, generator=g)
        rate = torch.exp(0.7 * torch.tanh(x) @ mixing - 6.5)
        return x, torch.poisson(rate, generator=g)

    x, _ = seconds(generator(TEST))
    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: seconds(generator(seed, step)),
        F.poisson_nll_loss,
        (x, torch.exp(0.7 * torch.tanh(x) @ mixing - 6.5)),
        lambda out, rate: float(((out.exp() - rate) ** 2).mean().sqrt() / rate.std()),
    )


def spectra(seed: int) -> Training:
    """An autoencoder of absorption spectra of gases: thousandths, in 200 channels."""
    torch.manual_seed(seed)
    channel = torch.arange(200) / 200
    lines = torch.exp(-(((channel - torch.linspace(0.1, 0.9, 6)[:, None]) / 0.05) ** 2))
    model = small_output(mlp(200, 64, 6, 64, 200, activation=nn.SiLU))
    with torch.no_grad():
        model[0].weight.mul_(300)  # the first layer brings the units to about 1

    def gases(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2e-3 * torch.rand(count, 6, generator=g) @ lines
        return x, x

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return supervised(
        model,
        optimizer,
        lambda step: gases(256, generator(seed, step)),
        F.mse_loss,
        gases(500, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 250),
    )


CASES = (
    Case("sea_level", "Sea level.", 300, sea_level, "relative RMSE", False, 0.03),
    Case(
        "trading_policy",
        "Returns.",
        250,
        trading_policy,
        "gain in 1e-5 a second",
        True,
        0.1,
    ),
    Case("grid_voltages", "A power grid.", 200, grid_voltages, "relative RMSE", False, 0.05),
    Case(
        "seismic_denoiser", "Ground movement.", 120, seismic_denoiser, "relative RMSE", False, 0.05
    ),
    Case("implicit_feedback", "Purchases.", 150, implicit_feedback, "loss × 100", False, 0.1),
    Case("spike_rates", "Neurons.", 150, spike_rates, "relative error of rates", False, 0.1),
    Case("spectra", "Spectra.", 250, spectra, "relative RMSE", False, 0.05),
)
