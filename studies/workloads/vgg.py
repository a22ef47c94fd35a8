"""Classification without batch norm: a small VGG on scikit-learn's handwritten digits.

The plain design of Simonyan and Zisserman (2015): pairs of 3×3 convolutions, the map halved after
each, then linear layers, and nothing that would keep activations or gradients at a fixed size. The
data is that of `digits.py`; the paper's VGG-D needs no loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mpdiag.workloads.digits import Digits

__all__ = ["PlainNet", "Vgg"]

# size -> width
SIZES = {"small": 16, "large": 256}


class PlainNet(nn.Module):
    """Six 3×3 convolutions in pairs at 8×8, 4×4 and 2×2 pixels, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for wide in (width, 2 * width, 4 * width):
            for _ in range(2):
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, 10)
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(cast("Tensor", module.bias))

    def forward(self, images: Tensor) -> Tensor:
        """The logits [B, 10] of the images [B, 1, 8, 8]."""
        return cast("Tensor", self.classifier(self.features(images)))


@dataclass(frozen=True)
class Vgg(Digits):
    """The same digits and the same loss as `Digits`, SGD with momentum and cosine decay."""

    name: ClassVar[str] = "vgg"
    title: ClassVar[str] = "Handwritten digits, a plain network"
    summary: ClassVar[str] = (
        "A small VGG without batch norm learns to recognise handwritten digits."
    )
    family: ClassVar[str] = "image classification (VGG-D)"
    default_steps: ClassVar[int] = 300
    clip_norm: ClassVar[float | None] = 5.0

    size: Literal["small", "large"] = "small"
    """Width 16, or 256."""
    learning_rate: float = 0.03

    def model(self) -> nn.Module:
        """A `PlainNet` with fresh weights."""
        return PlainNet(SIZES[self.size])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with momentum 0.9 and weight decay 5e-4."""
        return SGD(model.parameters(), self.learning_rate, momentum=0.9, weight_decay=5e-4)
