"""Layers written by hand: norms, distances, masks, pools."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from studies.exhibits.exhibit import Batch, Chain, Exhibit, normal, perceptron, teach


def regression(g: torch.Generator) -> Batch:
    """16 features and 8 targets."""
    x = normal(g, 64, 16)
    return x, teach(x)


def readings(g: torch.Generator) -> Batch:
    """Raw sensor readings: kelvins and hectopascals, 900 ± 30."""
    x = normal(g, 64, 16)
    return 900 + 30 * x, teach(x)


def volts(g: torch.Generator) -> Batch:
    """Signals of a tenth of a millivolt."""
    x = normal(g, 64, 16)
    return 1e-4 * x, teach(x)


def large(g: torch.Generator) -> Batch:
    """Features around a thousand in size."""
    x = normal(g, 64, 16)
    return 1000 * x, teach(x)


class Standardise(nn.Module):
    """Zero mean and unit variance of each feature over the batch, variance as E[x²] − E[x]²."""

    def forward(self, x: Tensor) -> Tensor:
        """The transformed values, in the shape of ``x``."""
        mean = x.mean(0)
        variance = (x * x).mean(0) - mean * mean
        return (x - mean) / (variance + 1e-3).sqrt()


class TinyEpsRms(nn.Module):
    """RMS normalisation with an epsilon of 1e-12."""

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The transformed values, in the shape of ``x``."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


class UnitLength(nn.Module):
    """Vectors divided by their length, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape, of length 4."""
        return 4 * x / (x * x).sum(-1, keepdim=True).sqrt()


class CosineToAnchors(nn.Module):
    """Cosine of each vector with learned anchors, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = nn.Parameter(torch.randn(32, 16) * 300)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 32] of a batch."""
        a, b = x[:, None], self.anchors[None]
        dot = (a * b).sum(-1)
        return 4 * dot / ((a * a).sum(-1).sqrt() * (b * b).sum(-1).sqrt())


class SquaredDistances(nn.Module):
    """Radial basis functions from squared distances expanded as a² + b² − 2ab."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(32, 16) + 40)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 32] of a batch."""
        c = self.centres
        squared = (x * x).sum(-1)[:, None] + (c * c).sum(-1) - 2 * x @ c.T
        return torch.exp(-squared / 32)


def off_centre(g: torch.Generator) -> Batch:
    """Features at 40 ± 1."""
    x = normal(g, 64, 16)
    return x + 40, teach(x)


class MaskedAttention(nn.Module):
    """One attention head over 8 tokens; ``fill`` hides the padding."""

    def __init__(self, mask: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.mask = mask
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 8] from [B, 32]: 8 tokens of 4 features, the last of which says which are real."""
        x = x.view(-1, 8, 4)
        real = x[..., 3] > 0
        h = self.embed(x)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 4
        h = torch.softmax(self.mask(scores, real), -1) @ self.value(h)
        return cast("Tensor", self.head((h * real[..., None]).sum(1)))


class FillMask(nn.Module):
    """Fills with a constant."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, scores: Tensor, real: Tensor) -> Tensor:
        """The scores with masked entries pushed down."""
        return scores.masked_fill(~real[:, None], self.fill)


class AddMask(nn.Module):
    """Adds −1e9 where there is padding."""

    def forward(self, scores: Tensor, real: Tensor) -> Tensor:
        """The scores with masked entries pushed down."""
        return scores + (1 - real[:, None].to(scores.dtype)) * -1e9


def padded(g: torch.Generator, empty: float) -> Batch:
    """Eight tokens; a share of the samples is all padding."""
    tokens = normal(g, 64, 8, 4)
    tokens[:, 0, 3] = 1.0
    void = torch.rand(64, generator=g) < empty
    tokens[void, :, 3] = -1.0
    real = (tokens[..., 3] > 0).float()[..., None]
    x = tokens.flatten(1)
    return x, (tokens[..., :1] * real).sum(1) * torch.ones(8)


class PooledSum(nn.Module):
    """Convolution, then the sum over all 48×48 positions, as a mass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = SumPool()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 8] of a batch."""
        return cast("Tensor", self.head(self.pool(torch.relu(self.conv(x)))))


class SumPool(nn.Module):
    """Sum over positions, then brought back to size."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, C] of a batch."""
        return x.sum((2, 3)) / (x.shape[2] * x.shape[3] * 32)


def photographs(g: torch.Generator) -> Batch:
    """Images of 48×48 counts, some 60 on average, whose brightness is wanted."""
    level = 1 + torch.rand(16, 1, 1, 1, generator=g)
    x = 60 * level + 20 * normal(g, 16, 1, 48, 48)
    return x, (level.view(16, 1) - 1.5) * torch.ones(8)


def _regressor(*body: nn.Module) -> Chain:
    return Chain(nn.Sequential(*body), nn.MSELoss())


EXHIBITS = (
    Exhibit(
        "variance_of_large_values", "variance of raw readings as E[x²] − E[x]²",
        lambda: _regressor(Standardise(), perceptron(16, 64, 8)), readings,
    ),
    Exhibit(
        "rms_norm_tiny_eps", "RMS norm of small values with eps 1e-12",
        lambda: _regressor(TinyEpsRms(), perceptron(16, 64, 8)), volts,
    ),
    Exhibit(
        "vector_norm", "L2 norm of vectors of size 1e3 by hand",
        lambda: _regressor(UnitLength(), perceptron(16, 64, 8)), large,
    ),
    Exhibit(
        "cosine_distance", "cosine of large vectors by hand",
        lambda: _regressor(CosineToAnchors(), perceptron(32, 64, 8)), large, held_back=True,
    ),
    Exhibit(
        "squared_distances", "distances by a² + b² − 2ab",
        lambda: _regressor(SquaredDistances(), perceptron(32, 64, 8)), off_centre, rate=1e-2,
        steps=150,
    ),
    Exhibit(
        "attention_fill_1e9", "attention whose padding is filled with −1e9",
        lambda: _regressor(MaskedAttention(FillMask(-1e9))), lambda g: padded(g, 0.0),
    ),
    Exhibit(
        "attention_add_1e9", "−1e9 added to scores, some samples all padding",
        lambda: _regressor(MaskedAttention(AddMask())), lambda g: padded(g, 0.2),
        held_back=True,
    ),
    Exhibit(
        "pooled_sum", "sum over 2,304 positions of values near 100",
        lambda: _regressor(PooledSum()), photographs, rate=1e-3,
    ),
)  # fmt: skip
