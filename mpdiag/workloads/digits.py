"""Classification: a residual network with batch norm on scikit-learn's handwritten digits.

The 1,797 real images of 8×8 pixels (Alpaydin and Kaynak, UCI "Optical Recognition of Handwritten
Digits") that ship with scikit-learn, always split into 1,437 to train on and 360 held out; both parts
have the same mixture of digits and the same 13 writers. The model is a tiny ResNet of the paper's
kind, trained with SGD and momentum: the family that, in the paper, needs no loss scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads.protocol import Batch, DataSplit, Workload

SIZES = {"small": 16, "large": 256}  # width


@lru_cache(maxsize=2)
def digit_images(part: DataSplit) -> tuple[Tensor, Tensor]:
    """The images [N, 1, 8, 8], floats from 0 to 1 in steps of 1/16, and the labels [N], 0 to 9."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    chosen = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
    rows = chosen[0] if part == "train" else chosen[1]
    images = torch.tensor(pixels[rows], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels[rows], dtype=torch.int64)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, a 1×1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same = channels_in == channels_out and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A stem, residual blocks at 8×8, 4×4 and 2×2 pixels, their mean, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
        )
        self.classifier = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits [B, 10] of the images [B, 1, 8, 8]."""
        features = self.blocks(F.relu(self.norm(self.stem(images))))
        return cast("Tensor", self.classifier(features.mean(dim=(2, 3))))


@dataclass(frozen=True)
class Digits(Workload):
    """The digit classifier: cross entropy, SGD with momentum and cosine decay."""

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "Handwritten digits, a residual network"
    summary: ClassVar[str] = (
        "A small residual network with batch norm learns to recognise handwritten digits."
    )
    family: ClassVar[str] = "image classification (ILSVRC networks)"
    default_steps: ClassVar[int] = 300
    metric: ClassVar[str] = "accuracy"
    margin: ClassVar[float] = 0.01

    batch_size: int = 64
    learning_rate: float = 0.1
    size: Literal["small", "large"] = "small"

    def model(self) -> nn.Module:
        """A `ResidualNet` with fresh weights."""
        return ResidualNet(SIZES[self.size])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with Nesterov momentum 0.9 and weight decay 5e-4."""
        return SGD(
            model.parameters(), self.learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True
        )

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Images [B, 1, 8, 8] and labels [B], each epoch in a new order, full batches only."""
        images, labels = digit_images("train")
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < self.batch_size:
                order = torch.randperm(len(labels), generator=generator)
            chosen, order = order[: self.batch_size], order[self.batch_size :]
            yield images[chosen], labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, the mean over the batch."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def score(self, model: nn.Module) -> float:
        """The share of the 360 held-out digits that are classified correctly, 0 to 1."""
        device = next(model.parameters()).device
        images, labels = digit_images("test")
        return float((model(images.to(device)).argmax(1).cpu() == labels).float().mean())
