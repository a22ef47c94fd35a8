"""Dense regression: a small network takes the noise out of scikit-learn's photographs.

The two photographs of `sklearn.datasets.load_sample_images` (by danielbuechele and vultilion, CC BY
2.0), 427×640 pixels each. Crops for training come from the left 480 columns; the right 144 are held
out, and 16 between them belong to neither. Gaussian noise is added, and the network (after DnCNN,
Zhang et al. 2017, without its batch norm) predicts that noise, so its output is the noisy crop less
the prediction.

The loss is the mean of the squared error over every element, as in any pixel-wise regression, and
this is what makes gradients small: with N elements each one's gradient is 2 · error / N, and N is
442,368 in the small size and 2,359,296 in the large one. Nothing else is unusual. The paper has
no such task; like its SSD, this one spreads the loss over many outputs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads.protocol import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Denoiser", "DenoisingNet", "photographs", "psnr"]

TRAIN_COLUMNS = slice(0, 480)
TEST_COLUMNS = slice(496, 640)

# size -> crops in a batch, pixels along a crop's side
SIZES = {"small": (64, 48), "large": (192, 64)}


@lru_cache(maxsize=2)
def photographs(part: Literal["train", "test"]) -> Tensor:
    """The part's columns of both photographs, [2, 3, 427, columns], floats from 0 to 1."""
    from sklearn.datasets import load_sample_images

    columns = TRAIN_COLUMNS if part == "train" else TEST_COLUMNS
    pictures = [torch.tensor(picture) for picture in load_sample_images().images]
    return torch.stack(pictures)[:, :, columns].permute(0, 3, 1, 2).float() / 255


def psnr(image: Tensor, reference: Tensor) -> float:
    """The peak signal-to-noise ratio in dB, 10 · log10(1 / MSE), for values whose peak is 1."""
    return -10 * math.log10(float(F.mse_loss(image, reference)))


class DenoisingNet(nn.Module):
    """Five 3×3 convolutions, ReLU between them, of `width` channels inside and 3 outside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        channels = [3, width, width, width, width, 3]
        layers: list[nn.Module] = []
        for channels_in, channels_out in itertools.pairwise(channels):
            layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU()]
        self.noise = nn.Sequential(*layers[:-1])

    def forward(self, noisy: Tensor) -> Tensor:
        """The cleaned images, of the shape of the noisy ones, [B, 3, H, W]."""
        return noisy - cast("Tensor", self.noise(noisy))


@dataclass(frozen=True)
class Denoiser(Workload):
    """The denoiser: pixel-mean squared error, Adam with cosine decay."""

    name: ClassVar[str] = "denoiser"
    title: ClassVar[str] = "Denoising photographs"
    summary: ClassVar[str] = (
        "Five small convolutions learn to take noise out of photographs, pixel by pixel."
    )
    family: ClassVar[str] = "dense prediction (beside the paper's SSD)"
    default_steps: ClassVar[int] = 400
    metric: ClassVar[str] = "PSNR (dB)"
    margin: ClassVar[float] = 0.1

    size: Literal["small", "large"] = "small"
    """64 crops of 48×48 pixels a step, or 192 crops of 64×64, which is 5.3 times the work."""
    noise: float = 0.1
    """Standard deviation of the added noise, where white is 1: 20 dB before any denoising."""
    learning_rate: float = 1e-3

    def model(self) -> nn.Module:
        """A `DenoisingNet` with fresh weights."""
        return DenoisingNet()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam with torch's defaults."""
        return Adam(model.parameters(), self.learning_rate)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Noisy and clean crops, both [B, 3, side, side], from random places."""
        pictures = photographs("train")
        count, side = SIZES[self.size]
        generator = torch.Generator().manual_seed(seed)
        within = torch.arange(side)
        for _ in range(steps):
            picture = torch.randint(len(pictures), (count, 1, 1), generator=generator)
            top = torch.randint(pictures.shape[2] - side + 1, (count, 1, 1), generator=generator)
            left = torch.randint(pictures.shape[3] - side + 1, (count, 1, 1), generator=generator)
            crops = pictures[picture, :, top + within[:, None], left + within]
            clean = crops.permute(0, 3, 1, 2).contiguous()
            yield clean + self.noise * torch.randn(clean.shape, generator=generator), clean

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The squared error, the mean over every element of the batch."""
        noisy, clean = batch
        return F.mse_loss(model(noisy), clean)

    def score(self, model: nn.Module) -> float:
        """The PSNR of the cleaned held-out columns, in dB; their noise is always the same."""
        device = next(model.parameters()).device
        clean = photographs("test")
        generator = torch.Generator().manual_seed(0)
        noisy = clean + self.noise * torch.randn(clean.shape, generator=generator)
        return psnr(model(noisy.to(device)).cpu(), clean)
