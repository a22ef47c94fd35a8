"""The models that are timed: written here, for torchvision and transformers may not be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, as in ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class Cnn(nn.Module):
    """ResNet-50's layers; averages replace its poolings, whose backward passes are not deterministic."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.AvgPool2d(2)
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                layers.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        return self.head(self.blocks(x).mean((2, 3)))


class GptBlock(nn.Module):
    """Attention and two linear layers, each on normalised inputs, beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2: embeddings of word and place, blocks, a norm, and the output layer tied to the words."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.words(text) + self.places(places))))


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(text))[0])


@dataclass(frozen=True)
class Size:
    """A model with its batch.

    Attributes:
        make: Builds the model on the device in force.
        shape: Of the input; images (N, 3, H, W) or words (N, T).
        classes: Of the output; also the vocabulary.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int

    def batch(self, device: str, samples: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, the same each time; ``samples`` replaces the batch's own number."""
        generator = torch.Generator(device).manual_seed(1)
        shape = (samples or self.shape[0], *self.shape[1:])
        if len(shape) == 4:
            x = torch.randn(shape, generator=generator, device=device)
            targets = (shape[0],)
        else:
            x = torch.randint(self.classes, shape, generator=generator, device=device)
            targets = shape
        return x, torch.randint(self.classes, targets, generator=generator, device=device)

    def model(self, device: str) -> nn.Module:
        """The model with the same weights each time."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.make()


_RESNET, _SHORT = (3, 4, 6, 3), (1, 1)

FULL: dict[str, Size] = {
    "cnn": Size(lambda: Cnn(64, _RESNET, 1000), (64, 3, 224, 224), 1000),
    "gpt": Size(lambda: Gpt(50257, 1024, 768, 12, 12), (8, 1024), 50257),
    "lstm": Size(lambda: Lstm(10_000, 1024), (64, 128), 10_000),
    "xl": Size(lambda: Gpt(50257, 1024, 1600, 25, 48), (4, 1024), 50257),
}
"""25.6 M, 124 M, 37 M and 1.56 B parameters."""
SMALL: dict[str, Size] = {
    "cnn": Size(lambda: Cnn(64, _RESNET, 1000), (16, 3, 128, 128), 1000),
    "gpt": Size(lambda: Gpt(50257, 256, 768, 12, 4), (4, 256), 50257),
    "lstm": Size(lambda: Lstm(2000, 512), (32, 64), 2000),
    "xl": Size(lambda: Gpt(50257, 1024, 1600, 25, 48), (4, 1024), 50257),
}
"""What bits are compared on, and what a quick pass times."""
TINY: dict[str, Size] = {
    "cnn": Size(lambda: Cnn(8, _SHORT, 10), (2, 3, 32, 32), 10),
    "gpt": Size(lambda: Gpt(64, 16, 32, 2, 2), (2, 16), 64),
    "lstm": Size(lambda: Lstm(32, 16), (2, 8), 32),
    "xl": Size(lambda: Gpt(64, 16, 48, 2, 3), (2, 16), 64),
}
"""What a rehearsal runs."""


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy, the mean over all targets."""
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())
