"""Beyond the paper: a GPT of two blocks learns to write Python's documentation, letter by letter.

A decoder-only Transformer with layer norm before each part (Radford et al., 2019), trained with AdamW
on the characters of the English that ships with Python (`english.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads import english
from mpdiag.workloads.protocol import Batch, Workload

CHARACTERS = 97
TEST_WINDOWS = 200

# size -> windows in a batch, characters in a window, width, heads, blocks
SIZES = {"small": (32, 64, 64, 4, 2), "large": (64, 512, 768, 12, 12)}


class Block(nn.Module):
    """Self-attention, then two linear layers; each on normalised inputs, beside a shortcut."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        shape = (len(x), x.shape[1], self.heads, -1)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.attend(self.norm1(x)).chunk(3, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.narrow(F.gelu(self.widen(self.norm2(x)))))


class GptModel(nn.Module):
    """Embeddings of character and place, blocks, a norm, a linear layer."""

    def __init__(self, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The logits [B, T, 97] of the character after each of `text` [B, T]."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.character(text) + self.place(places))
        return cast("Tensor", self.output(self.norm(x)))


@dataclass(frozen=True)
class Gpt(Workload):
    """The GPT: cross entropy of the next character, AdamW with cosine decay, clipped gradients."""

    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = "Language model, a small GPT"
    summary: ClassVar[str] = (
        "A Transformer learns to predict the next letter of Python's own documentation."
    )
    family: ClassVar[str] = "Transformer language models (beyond the paper)"
    default_steps: ClassVar[int] = 200
    metric: ClassVar[str] = "bits per character"
    higher_is_better: ClassVar[bool] = False
    margin: ClassVar[float] = 0.03
    clip_norm: ClassVar[float | None] = 1.0

    size: Literal["small", "large"] = "small"
    """32 windows of 64 characters, width 64 and 2 blocks; or 64 of 512, width 768 and 12 blocks."""
    learning_rate: float = 3e-3

    def model(self) -> nn.Module:
        """A `GptModel` with fresh weights."""
        return GptModel(*SIZES[self.size][1:])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW with weight decay 0.1 and its second momentum at 0.95."""
        return AdamW(model.parameters(), self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Characters [B, T] and the characters after each [B, T]."""
        count, length, *_ = SIZES[self.size]
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            pieces = english.windows(english.characters("train"), count, length + 1, generator)
            yield pieces[:, :-1], pieces[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, the mean over every position."""
        text, targets = batch
        return F.cross_entropy(model(text).flatten(0, 1), targets.flatten())

    def score(self, model: nn.Module) -> float:
        """The cross entropy of a character of held-out text, in bits."""
        device = next(model.parameters()).device
        length = SIZES[self.size][1]
        pieces = english.windows(
            english.characters("test"), TEST_WINDOWS, length + 1, torch.Generator().manual_seed(0)
        )
        losses = [
            F.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten())
            for part in pieces.to(device).split(50)
        ]
        return float(torch.stack(losses).mean()) / math.log(2)
