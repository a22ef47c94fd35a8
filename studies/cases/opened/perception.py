"""Speech, segmentation, attention: inputs with many places."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import (
    accuracy,
    cosine,
    digits,
    draws,
    fixed,
    perceptron,
    rows,
)


class Spectrum(nn.Module):
    """Pitch from a sound: a windowed spectrum by a matrix, its power, its logarithm."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        time, wave = torch.arange(samples), torch.arange(1, 25)
        angle = 2 * math.pi * wave[:, None] * time / samples
        self.register_buffer("sines", torch.cat([angle.cos(), angle.sin()]))
        self.sines: Tensor
        self.net = perceptron(24, 32, 8)

    def forward(self, sound: Tensor) -> Tensor:
        re, im = F.linear(sound, self.sines).chunk(2, -1)
        power = re * re + im * im
        logits: Tensor = self.net(torch.log(power + 1e-5) / 4)
        return logits


def pitch_by_power_spectrum(seed: int) -> Training:
    """Generated sounds of eight pitches as a recorder stores them, from -32768 to 32767."""
    torch.manual_seed(seed)
    model = Spectrum(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        pitch = torch.randint(8, (size,), generator=generator)
        loudness = 10 ** (1 + 2 * torch.rand(size, 1, generator=generator))
        phase = 2 * math.pi * torch.rand(size, 1, generator=generator)
        angle = 2 * math.pi * (pitch[:, None] * 1.3 + 2) * torch.arange(64) / 64
        sound = torch.sin(angle + phase) + 0.5 * torch.sin(2 * angle)
        noise = 0.5 * torch.randn(size, 64, generator=generator)
        return (loudness * (sound + noise)).round(), pitch

    def loss(index: int) -> Tensor:
        sound, pitch = batch(draws(seed, index), 64)
        return F.cross_entropy(model(sound), pitch)

    return Training(model, optimizer, loss, accuracy(model, *batch(fixed(92), 500)))


class LinearAttention(nn.Module):
    """Rows of a digit attend to each other without a softmax: φ(q) (φ(k)ᵀ v) / φ(q) Σφ(k)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 8, 8)) + self.place
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        seen = q @ (k.transpose(1, 2) @ v)
        weight = q @ k.sum(1)[:, :, None].to(q.dtype)
        h = self.norm(h + seen / weight)
        logits: Tensor = self.head(h.flatten(1))
        return logits


def digits_linear_attention(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = LinearAttention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Training(
        model,
        optimizer,
        loss,
        accuracy(model, test_x, test_y),
        schedule=cosine(optimizer, 1e-2, 250, 25),
    )


class Cells(nn.Module):
    """Numbers of people in a crowd: a density over places, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.density = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Softplus()
        )
        for layer in self.density:
            if isinstance(layer, nn.Conv2d) and layer.out_channels == 1:
                nn.init.constant_(layer.bias, -4.6)  # type: ignore[arg-type] # a prior of 0.01

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.density(x)
        return found


def crowd_density(seed: int) -> Training:
    """Generated dots, blurred; the target is a density of a hundredth a pixel and less."""
    torch.manual_seed(seed)
    model = Cells()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    blur = torch.exp(-0.3 * (torch.arange(-2, 3)[:, None] ** 2 + torch.arange(-2, 3) ** 2).float())
    blur = (blur / blur.sum())[None, None]

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        people = (torch.rand(size, 1, 32, 32, generator=generator) < 0.01).float()
        x = F.max_pool2d(people, 3, 1, 1)
        return x + 0.1 * torch.randn(x.shape, generator=generator), F.conv2d(
            people, blur, padding=2
        )

    def loss(index: int) -> Tensor:
        x, density = batch(draws(seed, index), 8)
        return F.mse_loss(model(x), density)

    def evaluate() -> float:
        x, density = batch(fixed(93), 40)
        with torch.no_grad():
            off = (model(x) - density).sum((1, 2, 3))
        return float(off.abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 250))


CASES = (
    Case(
        "pitch_by_power_spectrum",
        "The pitch of a generated sound from its power spectrum, taken inside the model.",
        300,
        pitch_by_power_spectrum,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "digits_linear_attention",
        "Linear attention over the rows of a digit.",
        250,
        digits_linear_attention,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "crowd_density",
        "A density of generated people, pixel by pixel.",
        250,
        crowd_density,
        "mean error of the count",
        False,
        0.5,
    ),
)
