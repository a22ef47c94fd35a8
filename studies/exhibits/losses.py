"""Losses written the way textbooks print them."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.exhibits.exhibit import (
    Batch,
    Chain,
    Exhibit,
    digits,
    normal,
    perceptron,
    teach,
)


class RowAttention(nn.Module):
    """Attention of rows of a digit to like rows: cosines, sharpened to 20."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.norm = nn.LayerNorm(64)
        self.key = nn.Linear(64, 64)
        self.softmax = softmax
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        h = self.norm(self.embed(x.view(-1, 8, 8)))
        k = 4.5 * F.normalize(self.key(h), dim=-1)
        weights = self.softmax(k @ k.transpose(1, 2))
        return cast("Tensor", self.head((weights @ h).mean(1)))


class HandmadeSoftmax(nn.Module):
    """Softmax by exp and sum, no maximum subtracted."""

    def forward(self, scores: Tensor) -> Tensor:
        """Weights that sum to 1."""
        e = scores.exp()
        return e / e.sum(-1, keepdim=True)


class NaiveBce(nn.Module):
    """Binary cross entropy by the formula: log of a probability and of one minus it."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        p = torch.sigmoid(logits.squeeze(-1))
        return -(y * torch.log(p + 1e-12) + (1 - y) * torch.log(1 - p + 1e-12)).mean()


def far_classes(g: torch.Generator) -> Batch:
    """Two classes far apart: logits grow large."""
    y = torch.randint(0, 2, (64,), generator=g).float()
    return normal(g, 64, 16) + 6.0 * (2 * y[:, None] - 1), y


class MixtureNll(nn.Module):
    """Mixture of four Gaussians: each one's log-likelihood is a sum over 256 values."""

    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.full((4, 1), -2.0))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        z = (y[:, None] - out.view(-1, 4, 256)) / self.log_sigma.exp()
        likelihood = -(0.5 * z * z + self.log_sigma).sum(-1)
        return -torch.logsumexp(likelihood, -1).mean() / 256


def wide_targets(g: torch.Generator) -> Batch:
    """256 targets for each of 64 samples, some ten in size."""
    x = normal(g, 64, 16)
    return x, 8 * teach(x).repeat(1, 32) + normal(g, 64, 256)


class NaiveSoftplus(nn.Module):
    """Poisson regression whose rate is log(1 + exp(x))."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        rate = torch.log(1 + torch.exp(out.squeeze(-1) * 10)) + 1e-3
        return (rate - y * torch.log(rate)).mean() / 10


def counts(g: torch.Generator) -> Batch:
    """Counts from 0 to some 40."""
    x = normal(g, 64, 16)
    return x, (20 + 20 * teach(x)[:, 0]).round()


class Contrastive(nn.Module):
    """InfoNCE by exp and sum at a small temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, z: Tensor, _y: Tensor) -> Tensor:
        """The loss of pairs: row i and row i + n/2."""
        a, b = F.normalize(z, dim=-1).chunk(2)
        e = torch.exp(a @ b.T / self.temperature)
        return -torch.log(e.diagonal() / e.sum(-1)).mean()


def pairs(g: torch.Generator) -> Batch:
    """Two noisy views of each of 32 objects."""
    x = normal(g, 32, 16)
    return torch.cat([x + 0.3 * normal(g, 32, 16) for _ in range(2)]), torch.zeros(1)


class JointLikelihood(nn.Module):
    """The probability of a whole sequence as a product, then its logarithm."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        p = torch.softmax(out.view(-1, 24, 4), -1)
        chosen = p.gather(-1, y[..., None]).squeeze(-1)
        return -torch.log(chosen.prod(-1) + 1e-30).mean() / 24


def sequences(g: torch.Generator) -> Batch:
    """24 symbols out of four, hard to guess."""
    x = normal(g, 64, 16)
    noisy = teach(x).repeat(1, 3) * 2 + 0.5 * normal(g, 64, 24)
    return x, noisy.clamp(-1.99, 1.99).add(2).long()


class Vae(nn.Module):
    """A variational autoencoder of pixels from 0 to 255, whose KL term has exp(log variance)."""

    def __init__(self, gain: float, size: float) -> None:
        super().__init__()
        self.gain, self.size = gain, size
        self.encoder = perceptron(64, 32, 16)
        self.decoder = perceptron(8, 32, 64)
        self.kl = Kl()

    def forward(self, x: Tensor, _y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        mean, log_variance = (self.encoder(x * self.size) * self.gain).chunk(2, -1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        code = mean + noise * torch.tanh(log_variance)
        error = F.mse_loss(self.decoder(code), x)
        loss: Tensor = error + 1e-3 * self.kl(mean, log_variance)
        return loss


class Kl(nn.Module):
    """KL divergence of a diagonal Gaussian from the standard one, compressed by a logarithm."""

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """The mean over the batch."""
        each = 0.5 * (log_variance.exp() - 1 - log_variance + mean * mean)
        return torch.log1p(each.sum(-1)).mean()


EXHIBITS = (
    Exhibit(
        "handmade_softmax", "softmax by hand, no maximum subtracted",
        lambda: Chain(RowAttention(HandmadeSoftmax()), nn.CrossEntropyLoss()), digits,
        rate=1e-3,
    ),
    Exhibit(
        "naive_bce", "binary cross entropy by the formula",
        lambda: Chain(perceptron(16, 32, 1), NaiveBce()), far_classes, rate=1e-2,
    ),
    Exhibit(
        "log_likelihood_sum", "log-likelihood of a mixture, summed over 256 values",
        lambda: Chain(perceptron(16, 64, 1024), MixtureNll()), wide_targets,
    ),
    Exhibit(
        "naive_softplus", "log(1 + exp(x)) of large x",
        lambda: Chain(perceptron(16, 32, 1), NaiveSoftplus()), counts, rate=1e-2, steps=100,
    ),
    Exhibit(
        "contrastive", "contrastive loss at temperature 0.03 by exp and sum",
        lambda: Chain(perceptron(16, 64, 16), Contrastive(0.03)), pairs,
    ),
    Exhibit(
        "joint_likelihood", "product of many probabilities",
        lambda: Chain(perceptron(16, 64, 96), JointLikelihood()), sequences, held_back=True,
    ),
    Exhibit("vae_kl", "exp of a large log variance", lambda: Vae(12.0, 16.0), digits, steps=100),
)  # fmt: skip
