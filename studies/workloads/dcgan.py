"""Generation: a DCGAN learns to draw handwritten digits, two models against each other.

The generator (Radford et al., 2016: transposed convolutions with batch norm, ReLU, tanh) turns noise
into pictures of 8×8 pixels; the discriminator (convolutions with batch norm and leaky ReLU) tells
them from scikit-learn's real digits. Each has its own loss and its own Adam. A step updates
the discriminator, then the generator against the updated discriminator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mpdiag.workloads.digits import digit_images
from mpdiag.workloads.protocol import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Dcgan", "Gan", "frechet_distance"]

NOISE = 32
COMPONENTS = 20
TEST_PICTURES = 1000

# size -> pictures in a batch, width
SIZES = {"small": (64, 16), "large": (256, 256)}


class Gan(nn.Module):
    """A generator and a discriminator, held together so that one recorder sees both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 4 * 2 * width, bias=False),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * 2 * width, 1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Pictures [B, 1, 8, 8] from -1 to 1 of the noise [B, 32]."""
        return cast("Tensor", self.generator(noise))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The distance of two sets of rows [N, D] and [M, D], modelled as Gaussians (Fréchet, 1957).

    |mean_a − mean_b|² + tr(A + B − 2·(A·B)^½) with covariances A and B: the measure of "FID", which
    takes the rows from a classifier.
    """
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    # The eigenvalues of A·B are those of the symmetric A^½·B·A^½, and none is below 0.
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    means = ((a.mean(0) - b.mean(0)) ** 2).sum()
    return float(means + cov_a.trace() + cov_b.trace() - 2 * between)


@lru_cache(maxsize=1)
def _real() -> tuple[Tensor, Tensor]:
    """Held-out digits [360, 64] and the directions [64, 20] in which training digits vary most."""
    pictures = (digit_images("train")[0] * 2 - 1).flatten(1).double()
    directions = torch.linalg.eigh(torch.cov(pictures.T))[1][:, -COMPONENTS:]
    return (digit_images("test")[0] * 2 - 1).flatten(1), directions


@dataclass(frozen=True)
class Dcgan(Workload):
    """The GAN: logistic losses, Adam with momentum 0.5 for each model."""

    name: ClassVar[str] = "dcgan"
    title: ClassVar[str] = "Drawing digits, a DCGAN"
    summary: ClassVar[str] = (
        "A generator learns to draw digits that a discriminator cannot tell from real ones."
    )
    family: ClassVar[str] = "generative adversarial networks (DCGAN)"
    default_steps: ClassVar[int] = 400
    metric: ClassVar[str] = "Fréchet distance"
    higher_is_better: ClassVar[bool] = False
    margin: ClassVar[float] = 0.4

    size: Literal["small", "large"] = "small"
    """64 pictures a step and width 16, or 256 and width 256."""
    learning_rate: float = 1e-3

    def model(self) -> nn.Module:
        """A fresh `Gan`, weights from a normal distribution of 0.05."""
        gan = Gan(SIZES[self.size][1])
        for module in gan.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                nn.init.normal_(module.weight, std=0.05)
        return gan

    def optimizers(self, model: nn.Module) -> tuple[Optimizer, ...]:
        """Adam for the discriminator, then Adam for the generator."""
        gan = cast("Gan", model)
        parts = (gan.discriminator, gan.generator)
        return tuple(
            Adam(part.parameters(), self.learning_rate, betas=(0.5, 0.999)) for part in parts
        )

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Digits [B, 1, 8, 8] from -1 to 1, and noise [B, 32] for each of the two losses."""
        pictures = digit_images("train")[0] * 2 - 1
        generator = torch.Generator().manual_seed(seed)
        count = SIZES[self.size][0]
        for _ in range(steps):
            chosen = torch.randint(len(pictures), (count,), generator=generator)
            noises = torch.randn(2, count, NOISE, generator=generator)
            yield pictures[chosen], noises[0], noises[1]

    def losses(self, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        """The discriminator's loss, then the generator's; each a mean over the batch."""
        gan = cast("Gan", model)
        real, first, second = batch
        truth = gan.discriminator(real)
        lie = gan.discriminator(gan(first).detach())
        yield (
            F.binary_cross_entropy_with_logits(truth, torch.ones_like(truth))
            + F.binary_cross_entropy_with_logits(lie, torch.zeros_like(lie))
        )
        judged = gan.discriminator(gan(second))
        yield F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    def score(self, model: nn.Module) -> float:
        """The Fréchet distance of 1,000 drawn digits from the held-out ones, along 20 directions."""
        device = next(model.parameters()).device
        noise = torch.randn(TEST_PICTURES, NOISE, generator=torch.Generator().manual_seed(0))
        drawn = model(noise.to(device)).cpu().float().flatten(1).double()
        real, directions = _real()
        return frechet_distance(drawn @ directions, real.double() @ directions)
