"""Models with awkward shapes that the advice was built with.

Each takes its sizes from its modules, so that a module made again with another size is all it takes.
``batch(rows, steps)`` makes its inputs, and ``loss`` its loss of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, STEPS = 6, 10


class Model(nn.Module):
    """A model with its data; most classify into ten classes."""

    classes = 10

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        """Inputs."""
        raise NotImplementedError

    def loss(self, *batch: Tensor) -> Tensor:
        """Of a batch."""
        y: Tensor = self(*batch)
        return F.cross_entropy(y, torch.arange(len(y)) % self.classes)


class Images(Model):
    """Its inputs are images for the first convolution."""

    side = 12

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        del steps
        first = next(m for m in self.modules() if hasattr(m, "in_channels"))
        return (torch.randn(rows, int(first.in_channels), self.side, self.side),)  # type: ignore[arg-type]


class Tokens(Model):
    """Its inputs are words of the first embedding; it predicts the next ones."""

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, 37, (rows, steps)),)

    def loss(self, *batch: Tensor) -> Tensor:
        y: Tensor = self(*batch)
        return F.cross_entropy(y.flatten(0, 1), batch[0].flatten())


class GroupedCnn(Images):
    """Groups, and a group norm after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 36, 3, padding=1)
        self.deep = nn.Conv2d(36, 36, 3, padding=1, groups=3)
        self.norm = nn.GroupNorm(4, 36)
        self.head = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.relu(self.norm(self.deep(self.stem(x)))).mean((2, 3)))
        return y


class DepthwiseCnn(Images):
    """Depthwise convolutions, one with two outputs a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, stride=2)
        self.depth = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.norm = nn.BatchNorm2d(20)
        self.point = nn.Conv2d(20, 44, 1)
        self.wide = nn.Conv2d(44, 88, 3, groups=44)
        self.head = nn.Linear(88, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(F.relu(self.norm(self.depth(self.stem(x)))))
        y: Tensor = self.head(self.wide(x).mean((2, 3)))
        return y


class Upsampler(Images):
    """A transposed convolution with groups."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 18, 4, stride=2, padding=1)
        self.narrow = nn.Conv2d(18, 30, 3, padding=1)
        self.up = nn.ConvTranspose2d(30, 18, 4, stride=2, padding=1, groups=2)
        self.out = nn.Conv2d(18, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(F.relu(self.up(F.relu(self.narrow(F.relu(self.down(x)))))))
        return y

    def loss(self, *batch: Tensor) -> Tensor:
        return F.mse_loss(self(*batch), batch[0])


class ModuleAttention(Tokens):
    """``MultiheadAttention`` with seven heads of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 63)
        self.attend = nn.MultiheadAttention(63, 7, batch_first=True)
        self.norm = nn.LayerNorm(63)
        self.head = nn.Linear(63, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        y: Tensor = self.head(self.norm(x + self.attend(x, x, x)[0]))
        return y


class PackedAttention(Tokens):
    """Queries, keys and values in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.words = nn.Embedding(37, 60)
        self.packed = nn.Linear(60, 180)
        self.out = nn.Linear(60, 60)
        self.head = nn.Linear(60, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        b, t, _ = x.shape
        q, k, v = self.packed(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.head(x + self.out(y.transpose(1, 2).reshape(b, t, -1)))
        return found


class GroupedQueries(Tokens):
    """Fewer heads of keys and values, all in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.shared = 6, 2
        self.words = nn.Embedding(37, 66)
        self.packed = nn.Linear(66, 110, bias=False)
        self.out = nn.Linear(66, 66, bias=False)
        self.head = nn.Linear(66, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        b, t, _ = x.shape
        width = self.packed.out_features // (self.heads + 2 * self.shared)
        parts = [self.heads * width, self.shared * width, self.shared * width]
        q, k, v = (p.view(b, t, -1, width).transpose(1, 2) for p in self.packed(x).split(parts, -1))
        k, v = (p.repeat_interleave(self.heads // self.shared, 1) for p in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.head(x + self.out(y.transpose(1, 2).reshape(b, t, -1)))
        return found


class TiedLanguageModel(Tokens):
    """One weight is embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 28)
        self.rnn = nn.LSTM(28, 28, num_layers=2, batch_first=True)
        self.head = nn.Linear(28, 61)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(self.words(tokens))[0])
        return y


class UNet(Images):
    """A concatenation of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 20, 3, padding=1, stride=2)
        self.deep = nn.Conv2d(20, 28, 3, padding=1)
        self.up = nn.ConvTranspose2d(28, 18, 2, stride=2)
        self.join = nn.Conv2d(30, 12, 3, padding=1)
        self.head = nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        b = F.relu(self.deep(F.relu(self.second(a))))
        y: Tensor = self.head(F.relu(self.join(torch.cat([a, self.up(b)], 1))))
        return y

    def loss(self, *batch: Tensor) -> Tensor:
        y: Tensor = self(*batch)
        return F.cross_entropy(y, torch.zeros(len(y), *y.shape[2:], dtype=torch.long))


class Residual(Images):
    """Residual sums, batch norms and a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, padding=1, bias=False)
        self.a1 = nn.Conv2d(20, 28, 3, padding=1, bias=False)
        self.n1 = nn.BatchNorm2d(28)
        self.a2 = nn.Conv2d(28, 20, 3, padding=1, bias=False)
        self.n2 = nn.BatchNorm2d(20)
        self.b1 = nn.Conv2d(20, 36, 3, stride=2, padding=1, bias=False)
        self.short = nn.Conv2d(20, 36, 1, stride=2, bias=False)
        self.head = nn.Linear(36 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.n2(self.a2(F.relu(self.n1(self.a1(x))))))
        x = F.relu(self.b1(x) + self.short(x))
        y: Tensor = self.head(F.max_pool2d(x, 2).flatten(1))
        return y


class Mixer(Images):
    """Products along tokens and along channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 30, 4, stride=4)
        self.norm = nn.LayerNorm(30)
        self.token1, self.token2 = nn.Linear(9, 20), nn.Linear(20, 9)
        self.mix1, self.mix2 = nn.Linear(30, 44), nn.Linear(44, 30)
        self.head = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.mix2(F.gelu(self.mix1(x)))
        y: Tensor = self.head(x.mean(1))
        return y


class Recurrent(Model):
    """A bidirectional LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(13, 22, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(44, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(x)[0][:, -1])
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, steps, self.rnn.input_size),)


class Audio(Model):
    """One-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 20, 9, stride=2), nn.BatchNorm1d(20), nn.PReLU(20),
            nn.Conv1d(20, 36, 5, stride=2), nn.ReLU(), nn.Conv1d(36, 60, 3, groups=4),
        )  # fmt: skip
        self.head = nn.Linear(60, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x).amax(-1))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        first: Any = self.layers[0]
        return (torch.randn(rows, first.in_channels, 10 * steps),)


class Recommender(Model):
    """Embeddings of two widths, joined and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(51, 18), nn.Embedding(43, 22)
        self.first = nn.Linear(18 + 22 + 5, 50)
        self.second = nn.Linear(50, 30)
        self.cross = nn.Linear(18, 22)
        self.out = nn.Linear(30, 1)

    def forward(self, user: Tensor, item: Tensor, facts: Tensor) -> Tensor:
        u, i = self.user(user), self.item(item)
        x = F.relu(self.first(torch.cat([u, i, facts], 1)))
        match = (self.cross(u) * i).sum(1, keepdim=True)
        y: Tensor = self.out(F.relu(self.second(x))) + match
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        del steps
        more = self.first.in_features - self.user.embedding_dim - self.item.embedding_dim
        return torch.randint(51, (rows,)), torch.randint(43, (rows,)), torch.randn(rows, more)

    def loss(self, *batch: Tensor) -> Tensor:
        y: Tensor = self(*batch)
        return F.binary_cross_entropy_with_logits(y[:, 0], torch.ones(len(y)))


class Variational(Images):
    """Two heads that make one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 18, 4, stride=4)
        self.hidden = nn.Linear(162, 50)
        self.mean, self.spread = nn.Linear(50, 10), nn.Linear(50, 10)
        self.grow = nn.Linear(10, 90)
        self.up = nn.ConvTranspose2d(10, 1, 4, stride=4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.hidden(F.relu(self.conv(x)).flatten(1)))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.up(F.relu(self.grow(z)).view(len(x), -1, 3, 3)), mean, spread

    def loss(self, *batch: Tensor) -> Tensor:
        y, mean, spread = self(*batch)
        distance = -0.5 * (1 + spread - mean**2 - spread.exp()).sum()
        return F.mse_loss(y, batch[0]) + 1e-3 * distance


class VisionTransformer(Images):
    """A token before nine patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 42, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 42))
        self.places = nn.Parameter(torch.zeros(1, 10, 42))
        self.block = nn.TransformerEncoderLayer(42, 3, 90, batch_first=True, dropout=0.0)
        self.head = nn.Linear(42, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        y: Tensor = self.head(self.block(x)[:, 0])
        return y


FIRST_HALF: tuple[type[Model], ...] = (
    GroupedCnn, DepthwiseCnn, Upsampler, ModuleAttention, PackedAttention, GroupedQueries,
    TiedLanguageModel, UNet, Residual, Mixer, Recurrent, Audio, Recommender, Variational,
    VisionTransformer,
)  # fmt: skip
