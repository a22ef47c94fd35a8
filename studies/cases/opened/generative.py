"""Densities and images: autoencoders, flows, mixtures, denoising."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import cosine, digits, draws, fixed, perceptron, photograph, rmse, rows


class Variational(nn.Module):
    """A variational autoencoder; pixels are Bernoulli, their likelihood written out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 16)
        self.decoder = perceptron(8, 64, 64)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_variance) * noise
        p = torch.sigmoid(self.decoder(z)).clamp(1e-7, 1 - 1e-7)
        likelihood = x * torch.log(p) + (1 - x) * torch.log(1 - p)
        divergence = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance)
        answer: Tensor = divergence.sum(1).mean() - likelihood.sum(1).mean()
        return answer


def digits_vae(seed: int) -> Training:
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        chosen = torch.randint(len(x), (64,), generator=generator)
        bright = (x[chosen] > 0.5).float()
        answer: Tensor = model(bright, torch.randn(64, 8, generator=generator))
        return answer

    def evaluate() -> float:
        with torch.no_grad():
            return float(model((test_x > 0.5).float(), torch.randn(500, 8, generator=fixed(30))))

    return Training(model, optimizer, loss, evaluate)


class Coupling(nn.Module):
    """A flow of four affine couplings in the plane (RealNVP): the log density of points."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(perceptron(1, 32, 2, activation=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, :1], x[:, 1:]
        volume = torch.zeros(len(x))
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            b = b * torch.exp(scale) + shift
            volume = volume + scale.sum(1)
            a, b = b, a
        return volume - 0.5 * (a**2 + b**2).sum(1) - math.log(2 * math.pi)


def _moons(count: int, generator: torch.Generator) -> Tensor:
    angle = math.pi * torch.rand(count, generator=generator)
    side = torch.randint(2, (count,), generator=generator).float() * 2 - 1
    x = torch.stack([side * torch.cos(angle) + 0.5 * side, side * torch.sin(angle)], 1)
    return x + 0.1 * torch.randn(count, 2, generator=generator)


def coupling_flow(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Coupling()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(index: int) -> Tensor:
        answer: Tensor = -model(_moons(128, draws(seed, index))).mean()
        return answer

    held = _moons(1000, fixed(31))

    def evaluate() -> float:
        with torch.no_grad():
            return -float(model(held).mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 300, 20))


class Autoencoder(nn.Module):
    """Squeezes pieces of a photograph of 16 × 16 pixels into 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(3, 16, 8, stride=8)
        self.spread = nn.ConvTranspose2d(16, 3, 8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        pixels: Tensor = self.spread(self.squeeze(x))
        return pixels


def photograph_autoencoder(seed: int) -> Training:
    torch.manual_seed(seed)
    picture = photograph(128)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mean = picture.mean()

    def loss(index: int) -> Tensor:
        corner = torch.randint(64, (2,), generator=draws(seed, index))
        piece = picture[:, corner[0] : corner[0] + 64, corner[1] : corner[1] + 64][None] - mean
        return F.mse_loss(model(piece), piece)

    whole = picture[None] - mean
    return Training(
        model,
        optimizer,
        loss,
        rmse(model, whole, whole),
        schedule=cosine(optimizer, 3e-3, 300),
    )


class Sines(nn.Module):
    """A picture as a function of its coordinates, by sines of high frequency (SIREN)."""

    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 3)
        self.frequency = frequency
        with torch.no_grad():
            self.first.weight.uniform_(-1 / 2, 1 / 2)
            bound = math.sqrt(6 / 64) / frequency
            self.second.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.frequency * self.first(x))
        h = torch.sin(self.frequency * self.second(h))
        colour: Tensor = self.last(h)
        return colour


def photograph_by_sines(seed: int) -> Training:
    torch.manual_seed(seed)
    picture = photograph(32)
    line = torch.linspace(-1, 1, 32)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).flatten(0, 1)
    colours = picture.permute(1, 2, 0).flatten(0, 1)
    model = Sines(30.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(1024, 512, seed, index)
        return F.mse_loss(model(places[chosen]), colours[chosen])

    return Training(
        model,
        optimizer,
        loss,
        rmse(model, places, colours),
        schedule=cosine(optimizer, 1e-3, 300),
    )


class Radiance(nn.Module):
    """Light at a place, never negative: the exponential of a network on sines of the place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(24, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = (x[:, :, None] * math.pi * torch.tensor([0.5, 1, 2, 3, 4, 6])).flatten(1)
        return torch.exp(self.net(torch.cat([waves.sin(), waves.cos()], 1)) - 4)


def dark_photograph(seed: int) -> Training:
    """Linear light at night: a hundredth of what it is by day."""
    torch.manual_seed(seed)
    picture = 0.01 * photograph(24) ** 2.2
    line = torch.linspace(-1, 1, 24)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).flatten(0, 1)
    light = picture.permute(1, 2, 0).flatten(0, 1)
    model = Radiance()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    measure = rmse(model, places, light)

    def loss(index: int) -> Tensor:
        chosen = rows(576, 400, seed, index)
        return F.mse_loss(model(places[chosen]), light[chosen])

    def evaluate() -> float:
        return measure() / float(light.std())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


class Denoiser(nn.Module):
    """The noise in a digit, from the noisy digit and how noisy it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64 + 16, 128, 64, activation=nn.SiLU)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        angle = level * torch.exp(torch.arange(8) * 0.5)
        noise: Tensor = self.net(torch.cat([x, angle.sin(), angle.cos()], 1))
        return noise


def digits_diffusion(seed: int) -> Training:
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def mixed(chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        level = torch.rand(len(chosen), 1, generator=generator)
        noise = torch.randn(chosen.shape, generator=generator)
        angle = level * math.pi / 2
        return angle.cos() * (2 * chosen - 1) + angle.sin() * noise, level, noise

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        chosen = x[torch.randint(len(x), (128,), generator=generator)]
        noisy, level, noise = mixed(chosen, generator)
        return F.mse_loss(model(noisy, level), noise)

    noisy, level, noise = mixed(test_x, fixed(33))

    def evaluate() -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(noisy, level), noise))

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 3e-3, 300, 30))


class GramOfFeatures(nn.Module):
    """A small network of random filters; the style of a picture is the products of its features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.filters = nn.Conv2d(3, 16, 5, stride=2)
        self.filters.requires_grad_(requires_grad=False)
        self.picture = nn.Parameter(torch.full((1, 3, size, size), 128.0))

    def style(self, picture: Tensor) -> Tensor:
        h = F.relu(self.filters(picture)).flatten(2)
        return h @ h.transpose(1, 2) / h.shape[2]

    def forward(self) -> Tensor:
        return self.style(self.picture)


def style_of_photograph(seed: int) -> Training:
    """A picture of 0 to 255 is changed until its features' products are the photograph's."""
    torch.manual_seed(seed)
    model = GramOfFeatures(48)
    with torch.no_grad():
        model.picture.add_(20 * torch.randn(model.picture.shape, generator=draws(seed)))
        wanted = model.style(255 * photograph(48)[None])
    optimizer = torch.optim.Adam([model.picture], lr=4.0)

    def loss(index: int) -> Tensor:
        answer: Tensor = ((model() - wanted) / wanted.norm()).pow(2).sum()
        return answer

    def evaluate() -> float:
        with torch.no_grad():
            return float((model() - wanted).norm() / wanted.norm())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 4.0, 150))


CASES = (
    Case(
        "digits_vae",
        "A variational autoencoder on black and white digits, likelihood written out.",
        300,
        digits_vae,
        "negative evidence bound in nats",
        False,
        1.0,
    ),
    Case(
        "coupling_flow",
        "Affine couplings on two generated moons.",
        300,
        coupling_flow,
        "negative log likelihood",
        False,
        0.2,
    ),
    Case(
        "photograph_autoencoder",
        "A convolutional autoencoder on pieces of a photograph.",
        300,
        photograph_autoencoder,
        "RMSE of pixels from 0 to 1",
        False,
        0.01,
    ),
    Case(
        "photograph_by_sines",
        "A photograph as a network of sines of its coordinates.",
        300,
        photograph_by_sines,
        "RMSE of pixels from 0 to 1",
        False,
        0.0025,
    ),
    Case(
        "dark_photograph",
        "Light of a darkened photograph as a function of its place.",
        300,
        dark_photograph,
        "relative error",
        False,
        0.03,
    ),
    Case(
        "digits_diffusion",
        "The noise in digits at every level, AdamW with a warm-up.",
        300,
        digits_diffusion,
        "mean square error",
        False,
        0.03,
    ),
    Case(
        "style_of_photograph",
        "The style of a photograph through products of features of pixels up to 255.",
        150,
        style_of_photograph,
        "relative error of the products",
        False,
        0.05,
    ),
)
