"""Twins of the exhibits that fail: the same operations on harmless values, or implemented correctly.

They catch false alarms: an ``exp`` alone is not a fault.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.exhibits.classics import regression
from studies.exhibits.exhibit import (
    Batch,
    Chain,
    Exhibit,
    digits,
    normal,
    perceptron,
    teach,
)
from studies.exhibits.layers import (
    FillMask,
    MaskedAttention,
    TinyEpsRms,
    UnitLength,
    padded,
)
from studies.exhibits.losses import RowAttention, Vae, counts, pairs


class SafeSoftmax(nn.Module):
    """Softmax by hand, with the maximum subtracted."""

    def forward(self, scores: Tensor) -> Tensor:
        """Weights that sum to 1."""
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)


class LibrarySoftplus(nn.Module):
    """Poisson regression whose rate is the library's softplus."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        rate = F.softplus(out.squeeze(-1) * 10) + 1e-3
        return (rate - y * torch.log(rate)).mean() / 10


class LibraryContrastive(nn.Module):
    """InfoNCE through the library's cross entropy, at temperature 0.2."""

    def forward(self, z: Tensor, _y: Tensor) -> Tensor:
        """The loss of pairs."""
        a, b = F.normalize(z, dim=-1).chunk(2)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


class GentleVariance(nn.Module):
    """Zero mean and unit variance of features of unit size, centred first."""

    def forward(self, x: Tensor) -> Tensor:
        """The transformed values, in the shape of ``x``."""
        centred = x - x.mean(0)
        return centred / (centred.pow(2).mean(0) + 1e-3).sqrt()


class Cubes(nn.Module):
    """Powers of values near 1."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        return ((1 + 0.5 * torch.tanh(out)).pow(3) - (1 + 0.5 * y).pow(3)).square().mean()


def even(g: torch.Generator) -> Batch:
    """Features of unit size."""
    x = normal(g, 64, 16)
    return 1 + x, teach(x)


def _regressor(*body: nn.Module) -> Chain:
    return Chain(nn.Sequential(*body), nn.MSELoss())


EXHIBITS = (
    Exhibit(
        "safe_softmax", "softmax by hand, maximum subtracted",
        lambda: Chain(RowAttention(SafeSoftmax()), nn.CrossEntropyLoss()), digits,
        rate=1e-3,
    ),
    Exhibit(
        "library_softplus", "the library's softplus of large x",
        lambda: Chain(perceptron(16, 32, 1), LibrarySoftplus()), counts, rate=1e-2, steps=100,
    ),
    Exhibit(
        "library_contrastive", "contrastive loss by cross entropy, temperature 0.2",
        lambda: Chain(perceptron(16, 64, 16), LibraryContrastive()), pairs,
    ),
    Exhibit(
        "gentle_variance", "variance of unit values by hand",
        lambda: _regressor(GentleVariance(), perceptron(16, 64, 8)), even,
    ),
    Exhibit(
        "rms_norm", "RMS norm by hand of unit values, eps 1e-5",
        lambda: _regressor(TinyEpsRms(1e-5), perceptron(16, 64, 8)), regression,
    ),
    Exhibit(
        "unit_length", "L2 norm by hand of unit values",
        lambda: _regressor(UnitLength(), perceptron(16, 64, 8)), even, held_back=True,
    ),
    Exhibit(
        "attention_fill_1e4", "attention whose padding is filled with −1e4",
        lambda: _regressor(MaskedAttention(FillMask(-1e4))), lambda g: padded(g, 0.0),
    ),
    Exhibit("cubes", "third powers near 1", lambda: Chain(perceptron(16, 64, 8), Cubes()), regression),
    Exhibit(
        "small_vae", "exp of small log variances", lambda: Vae(0.5, 1.0), digits, held_back=True
    ),
)  # fmt: skip
