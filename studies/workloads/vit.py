"""Beyond the paper: a vision Transformer on scikit-learn's handwritten digits.

Each picture of 8×8 pixels is cut into 16 patches of 2×2, which become 16 words (Dosovitskiy et al.,
2021); their mean says what they show. The data is that of `digits.py`, the block that of `gpt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mpdiag.workloads.digits import Digits
from mpdiag.workloads.gpt import Block

__all__ = ["VisionTransformer", "Vit"]

SIDE, PATCH = 8, 2

# size -> width, heads, blocks
SIZES = {"small": (48, 4, 3), "large": (768, 12, 12)}


class VisionTransformer(nn.Module):
    """A convolution that cuts patches, places, blocks, a norm, a linear layer."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.5 * torch.randn(1, (SIDE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits [B, 10] of the images [B, 1, 8, 8]."""
        words = self.patches(images).flatten(2).transpose(1, 2)
        x = self.blocks(words + self.places)
        return cast("Tensor", self.classifier(self.norm(x).mean(dim=1)))


@dataclass(frozen=True)
class Vit(Digits):
    """The same digits and the same loss as `Digits`, AdamW with cosine decay."""

    name: ClassVar[str] = "vit"
    title: ClassVar[str] = "Handwritten digits, a vision Transformer"
    summary: ClassVar[str] = (
        "A small Transformer learns to recognise handwritten digits by patches."
    )
    family: ClassVar[str] = "vision Transformers (beyond the paper)"
    default_steps: ClassVar[int] = 300
    clip_norm: ClassVar[float | None] = 1.0

    size: Literal["small", "large"] = "small"
    """Width 48 and 3 blocks, or 768 and 12."""
    learning_rate: float = 2e-3

    def model(self) -> nn.Module:
        """A `VisionTransformer` with fresh weights."""
        return VisionTransformer(*SIZES[self.size])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW with weight decay 0.05."""
        return AdamW(model.parameters(), self.learning_rate, weight_decay=0.05)
