"""Voices, bars and brains: much is computed between the measurement and the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    accuracy,
    cosine,
    mlp,
    supervised,
)


class Whisper(nn.Module):
    """Bands of power, their logarithms and a classifier; bands are learned."""

    def __init__(self) -> None:
        super().__init__()
        band, centre = torch.arange(65.0)[:, None], torch.linspace(4, 60, 12)
        self.bands = nn.Parameter(torch.exp(-(((band - centre) / 4) ** 2)))
        self.norm, self.out = nn.LayerNorm(12), mlp(12, 24, 4)

    def forward(self, sound: Tensor) -> Tensor:
        frames = sound.unfold(1, 128, 64) * torch.hann_window(128)
        power = torch.fft.rfft(frames).abs().square() / 128
        bands = power @ self.bands.clamp(min=0)
        return self.out(self.norm(torch.log(bands + 1e-12).mean(1)))


def whispered_vowels(seed: int) -> Training:
    """Four vowels, whispered far from the microphone: full scale is one, a whisper 1e-4."""
    torch.manual_seed(seed)
    model = Whisper()

    def vowels(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 4, (n,), generator=g)
        breath = torch.fft.rfft(torch.randn(n, 512, generator=g))
        band = torch.arange(257.0)
        first = torch.tensor([30.0, 50, 80, 60])[y][:, None]
        second = torch.tensor([170.0, 110, 130, 200])[y][:, None]
        shape = torch.exp(-(((band - first) / 18) ** 2)) + torch.exp(-(((band - second) / 18) ** 2))
        loud = 1e-4 * torch.exp(0.5 * torch.randn(n, 1, generator=g))
        return torch.fft.irfft(breath * (shape + 0.15)) * loud, y

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, vowels, F.cross_entropy, accuracy, 32, 500)


class Marimba(nn.Module):
    """A bar's lowest tones by how stiff it is along its length."""

    def __init__(self) -> None:
        super().__init__()
        self.log_stiff = nn.Parameter(torch.zeros(30))
        bend = torch.diag(-2 * torch.ones(30)) + torch.diag(torch.ones(29), 1)
        self.register_buffer("bend", 15 * (bend + torch.diag(torch.ones(29), -1)))

    def forward(self, load: Tensor) -> Tensor:
        """Logarithms of the three lowest frequencies, with masses (n, 30) put on."""
        stiff = self.bend.T @ (self.log_stiff.exp()[:, None] * self.bend)
        root = (1 + load).rsqrt()
        square = torch.linalg.eigvalsh(root[:, :, None] * stiff.float() * root[:, None])
        return 0.5 * square[:, :3].log()


def bars_of_a_marimba(seed: int) -> Training:
    """Where a bar was carved, from its tones with a magnet here and there."""
    torch.manual_seed(seed)
    model, real = Marimba(), Marimba()
    place = torch.linspace(-1, 1, 30)
    with torch.no_grad():
        real.log_stiff.copy_(-0.8 * torch.exp(-((place / 0.4) ** 2)))

    def magnets(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(0, 30, (n, 1), generator=g)
        load = torch.zeros(n, 30).scatter_(1, at, 2 + torch.rand(n, 1, generator=g))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return load, real(load) + 1e-3 * torch.randn(n, 3, generator=g)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    def cents(out: Tensor, y: Tensor) -> float:
        return 1731 * float((out - y).abs().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return supervised(
        model, optimizer, seed, magnets, loss, cents, 16, 200, schedule=cosine(optimizer, 120)
    )


class Brain(nn.Module):
    """Differences of neighbouring electrodes, then filters in time."""

    def __init__(self) -> None:
        super().__init__()
        pairs = torch.eye(8)[:7] - torch.eye(8)[1:]
        self.register_buffer("pairs", pairs)
        self.filters, self.out = nn.Conv1d(7, 8, 9), nn.Linear(8, 2)

    def forward(self, microvolts: Tensor) -> Tensor:
        between = self.pairs @ microvolts
        between = between - between.mean(-1, keepdim=True)
        h = self.filters(between).square()
        return self.out(torch.log(h.mean(-1) + 1e-3))


def left_or_right_hand(seed: int) -> Training:
    """Imagined hands by a rhythm of some microvolts; electrodes have offsets of millivolts."""
    torch.manual_seed(seed)
    model = Brain()

    def trials(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 2, (n,), generator=g)
        t = torch.arange(64.0)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        rhythm = 2 * torch.sin(0.5 * t + phase)
        x = torch.randn(n, 8, 64, generator=g)
        x[:, 1] += rhythm * y[:, None]
        x[:, 6] += rhythm * (1 - y[:, None])
        return x + 2e4 * torch.randn(n, 8, 1, generator=g).clamp(-2.5, 2.5), y

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, trials, F.cross_entropy, accuracy, 32, 500)


CASES = (
    Case(
        "whispered_vowels",
        "Four whispered vowels by learned bands of power.",
        100,
        whispered_vowels,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "bars_of_a_marimba",
        "How a bar was carved, from its lowest tones.",
        120,
        bars_of_a_marimba,
        "cents",
        False,
        5.0,
    ),
    Case(
        "left_or_right_hand",
        "Imagined hands from electrodes with large offsets.",
        120,
        left_or_right_hand,
        "accuracy",
        True,
        0.05,
    ),
)
