"""Common models on common data."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.exhibits.exhibit import (
    Batch,
    Chain,
    Exhibit,
    digit_maps,
    digits,
    normal,
    perceptron,
    teach,
)


class ConvNet(nn.Module):
    """Two convolutions, each with a normalisation, a pooling and a linear layer."""

    def __init__(self, norm: str, *, depthwise: bool = False, gate: bool = False) -> None:
        super().__init__()

        def normalisation(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)

        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = normalisation(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, groups=16 if depthwise else 1)
        self.norm2 = normalisation(32)
        self.gate = nn.Linear(32, 32) if gate else None
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        if self.gate is not None:
            x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[..., None, None]
        return cast("Tensor", self.head(x.mean((2, 3))))


class Residual(nn.Module):
    """Three residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return cast("Tensor", self.head(x.mean((2, 3))))


class Recurrent(nn.Module):
    """Rows of a digit, one after the other."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        return cast("Tensor", self.head(self.rnn(x.view(-1, 8, 8))[0][:, -1]))


class Transformer(nn.Module):
    """An encoder over the rows of a digit, softmax and layer norm from the library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        h = self.embed(x.view(-1, 8, 8)) + self.place
        return cast("Tensor", self.head(self.encoder(h).mean(1)))


class NextSymbolModel(nn.Module):
    """Next-symbol model: embeddings, and cross entropy over 500 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.net = perceptron(64, 64, 500)

    def forward(self, x: Tensor) -> Tensor:
        """The logits [B, classes] of a batch."""
        return cast("Tensor", self.net(self.embedding(x).flatten(1)))


def symbols(g: torch.Generator) -> Batch:
    """Two symbols and the one that follows by a rule."""
    x = torch.randint(0, 25, (64, 2), generator=g)
    return x, x[:, 0] * 20 + x[:, 1] % 20


class Autoencoder(nn.Module):
    """Digits through a bottleneck of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 32, 8, 32, 64)

    def forward(self, x: Tensor, _y: Tensor) -> Tensor:
        """The scalar loss of a batch."""
        return F.mse_loss(self.net(x), x)


def regression(g: torch.Generator) -> Batch:
    """16 features and 8 targets."""
    x = normal(g, 64, 16)
    return x, teach(x)


def _classifier(body: nn.Module) -> Chain:
    return Chain(body, nn.CrossEntropyLoss())


EXHIBITS = (
    Exhibit("mlp", "a perceptron", lambda: _classifier(perceptron(64, 64, 32, 10)), digits),
    Exhibit(
        "cnn_batch_norm", "a CNN with batch norm", lambda: _classifier(ConvNet("batch")), digit_maps
    ),
    Exhibit("residual", "a residual network", lambda: _classifier(Residual()), digit_maps),
    Exhibit("lstm", "an LSTM", lambda: _classifier(Recurrent(nn.LSTM)), digits, rate=1e-2),
    Exhibit(
        "gru", "a GRU", lambda: _classifier(Recurrent(nn.GRU)), digits, rate=1e-2, held_back=True
    ),
    Exhibit("transformer", "a Transformer block", lambda: _classifier(Transformer()), digits),
    Exhibit(
        "layer_norm", "layer norm and GELU",
        lambda: Chain(
            nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)),
            nn.SmoothL1Loss(),
        ),
        regression,
    ),
    Exhibit("language", "embeddings, 500 classes", lambda: _classifier(NextSymbolModel()), symbols),
    Exhibit("autoencoder", "an autoencoder", Autoencoder, digits),
    Exhibit(
        "group_norm", "a CNN with group norm", lambda: _classifier(ConvNet("group")), digit_maps,
        held_back=True,
    ),
    Exhibit(
        "depthwise", "depthwise convolutions",
        lambda: _classifier(ConvNet("batch", depthwise=True)), digit_maps, held_back=True,
    ),
    Exhibit(
        "gated", "a CNN gated by a sigmoid", lambda: _classifier(ConvNet("batch", gate=True)),
        digit_maps,
    ),
    Exhibit(
        "sgd_mlp", "a perceptron, trained by SGD", lambda: _classifier(perceptron(64, 64, 10)),
        digits, rate=0.05, sgd=True,
    ),
)  # fmt: skip
