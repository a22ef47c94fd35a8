"""Models with awkward shapes that were written after the advice worked on the first half."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies.shapes.first_half import Images, Model, Tokens


class TabularAutoencoder(Model):
    """Its output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(29, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 11),
            nn.Linear(11, 50), nn.SiLU(), nn.Linear(50, 29),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        first: Any = self.layers[0]
        return (torch.randn(rows * steps, first.in_features),)

    def loss(self, *batch: Tensor) -> Tensor:
        return F.smooth_l1_loss(self(*batch), batch[0])


class Graph(Model):
    """Rows gathered from and added to nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(14, 26, bias=False), nn.Linear(14, 26)
        self.second = nn.Linear(52, 10)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.first(x).index_select(0, source)
        got = torch.zeros(len(x), sent.shape[1]).index_add(0, target, sent)
        y: Tensor = self.second(torch.cat([F.relu(got), F.relu(self.own(x))], -1))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        nodes = rows * steps
        ends = torch.randint(nodes, (2, 3 * nodes))
        return torch.randn(nodes, self.first.in_features), ends[0], ends[1]


class Siamese(Images):
    """One body called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 18, 3), nn.InstanceNorm2d(18), nn.ReLU(), nn.Conv2d(18, 30, 3, groups=6),
        )  # fmt: skip
        self.embed = nn.Linear(30, 20)
        self.judge = nn.Linear(60, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.embed(self.body(x).mean((2, 3)))
        b = self.embed(self.body(x.flip(-1)).mean((2, 3)))
        y: Tensor = self.judge(torch.cat([a, b, (a - b).abs()], 1))
        return y

    def loss(self, *batch: Tensor) -> Tensor:
        return F.softplus(self(*batch)).mean()


class Volumes(Model):
    """Three-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 14, 3, padding=1)
        self.norm = nn.BatchNorm3d(14)
        self.second = nn.Conv3d(14, 28, 3, stride=2, groups=2)
        self.head = nn.Linear(28, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y: Tensor = self.head(self.second(x).flatten(2).mean(2))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        del steps
        return (torch.randn(rows, self.first.in_channels, 6, 6, 6),)


class BilinearMatch(Model):
    """A bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 21), nn.Linear(10, 27)
        self.match = nn.Bilinear(21, 27, 13)
        self.head = nn.Linear(13, 10)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.match(self.left(a), self.right(b))))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        del steps
        return (
            torch.randn(rows, self.left.in_features),
            torch.randn(rows, self.right.in_features),
        )


class ManyTasks(Images):
    """Several heads of few outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 38, 3)
        self.shared = nn.Linear(38, 54)
        self.heads = nn.ModuleList([nn.Linear(54, n) for n in (3, 7, 10)])
        self.boxes = nn.Linear(54, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.shared(F.relu(self.body(x)).amax((2, 3))))
        return [*(head(x) for head in self.heads), self.boxes(x)]

    def loss(self, *batch: Tensor) -> Tensor:
        *found, boxes = self(*batch)
        total: Tensor = sum(
            F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)) for y in found
        )  # type: ignore[assignment]
        return total + F.l1_loss(boxes[:, :4], torch.zeros(len(boxes), 4))


class Shuffling(Images):
    """Channels shuffled between groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 3
        self.first = nn.Conv2d(3, 30, 3)
        self.narrow = nn.Conv2d(30, 30, 1, groups=3)
        self.depth = nn.Conv2d(30, 30, 3, padding=1, groups=30)
        self.wide = nn.Conv2d(30, 30, 1, groups=3)
        self.head = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.relu(self.narrow(x))
        b, c, h, w = y.shape
        y = y.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)
        found: Tensor = self.head((x + self.wide(self.depth(y))).mean((2, 3)))
        return found


class Dense(Images):
    """Each layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 13, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(13 + 11 * i) for i in range(4)])
        self.layers = nn.ModuleList([nn.Conv2d(13 + 11 * i, 11, 3, padding=1) for i in range(4)])
        self.head = nn.Linear(57, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found.append(layer(F.relu(norm(torch.cat(found, 1)))))
        y: Tensor = self.head(torch.cat(found, 1).mean((2, 3)))
        return y


class Translator(Tokens):
    """Recurrent cells with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(37, 18), nn.Embedding(37, 26)
        self.read = nn.GRU(18, 20, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(26 + 40, 34)
        self.ask = nn.Linear(34, 40)
        self.head = nn.Linear(34 + 40, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.read(self.source(tokens))[0]
        words = self.target(tokens)
        state = words.new_zeros(len(tokens), self.cell.hidden_size)
        found, seen = [], memory.mean(1)
        for i in range(tokens.shape[1]):
            state = self.cell(torch.cat([words[:, i], seen], 1), state)
            weights = torch.softmax((memory @ self.ask(state)[:, :, None])[..., 0], 1)
            seen = (weights[:, None] @ memory)[:, 0]
            found.append(self.head(torch.cat([state, seen], 1)))
        return torch.stack(found, 1)


class SqueezeExcite(Images):
    """Channels multiplied by gates."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Conv2d(3, 52, 1)
        self.depth = nn.Conv2d(52, 52, 3, padding=1, groups=52)
        self.norm = nn.GroupNorm(2, 52)
        self.squeeze, self.excite = nn.Conv2d(52, 13, 1), nn.Conv2d(13, 52, 1)
        self.shrink = nn.Conv2d(52, 22, 1)
        self.head = nn.Linear(22, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.depth(self.grow(x))))
        gate = self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        y: Tensor = self.head(self.shrink(x * gate.sigmoid()).mean((2, 3)))
        return y


class PositionedEncoder(Tokens):
    """Learned positions, a slice of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 54)
        self.places = nn.Parameter(torch.randn(24, 54))
        layer = nn.TransformerEncoderLayer(54, 6, 70, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(54, 37, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        y: Tensor = self.head(self.blocks(x))
        return y


class GatedExperts(Model):
    """Experts in one parameter, with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(20, 46)
        self.up = nn.Parameter(0.1 * torch.randn(3, 46, 100))
        self.down = nn.Parameter(0.1 * torch.randn(3, 50, 46))
        self.route = nn.Linear(46, 3)
        self.head = nn.Linear(46, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        weights = self.route(x)[:, :3].softmax(-1)
        a, b = torch.einsum("nd,edh->enh", x, self.up).chunk(2, -1)
        made = torch.bmm(F.silu(a) * b, self.down)
        y: Tensor = self.head(x + (made * weights.t()[..., None]).sum(0))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows * steps, self.enter.in_features),)


class SuperResolution(Images):
    """Pixels made of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 26, 3, padding=1)
        self.body = nn.Conv2d(26, 26, 3, padding=1)
        self.up = nn.Conv2d(26, 44, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.last = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = x + self.body(F.pad(x, (0, 0)))
        y: Tensor = self.last(F.relu(self.shuffle(self.up(x))))
        return y

    def loss(self, *batch: Tensor) -> Tensor:
        y: Tensor = self(*batch)
        return F.mse_loss(y, F.interpolate(batch[0], scale_factor=2))


class RotaryWindows(Tokens):
    """Attention written out, in windows of five, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.words = nn.Embedding(37, 72)
        self.q, self.k, self.v = (nn.Linear(72, 72, bias=False) for _ in range(3))
        self.out = nn.Linear(72, 72)
        self.head = nn.Linear(72, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        b, t, c = x.shape
        q, k, v = (
            m(x).view(b, t // 5, 5, self.heads, -1).transpose(2, 3)
            for m in (self.q, self.k, self.v)
        )
        width = q.shape[-1]
        angle = torch.arange(5)[:, None] / 10 ** torch.linspace(0, 1, width // 2)
        turn = torch.cat([angle, angle], -1)
        halves = [torch.cat([-y[..., width // 2 :], y[..., : width // 2]], -1) for y in (q, k)]
        q, k = (y * turn.cos() + h * turn.sin() for y, h in zip((q, k), halves, strict=True))
        weights = ((q @ k.transpose(-1, -2)) / math.sqrt(width)).softmax(-1)
        y = (weights @ v).transpose(2, 3).reshape(b, t, c)
        found: Tensor = self.head(x + self.out(y))
        return found


class ProjectedGenerator(Model):
    """An LSTM with projection, before transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(9, 30, proj_size=14, batch_first=True)
        self.grow = nn.Linear(14, 23 * 9)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(23, 19, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(19),
            nn.LeakyReLU(), nn.ConvTranspose2d(19, 1, 4, stride=2, padding=1),
        )  # fmt: skip
        self.judge = nn.Conv2d(1, 17, 3)
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        last = self.rnn(x)[0][:, -1]
        image = self.layers(self.grow(last).unflatten(1, (-1, 3, 3)))
        y: Tensor = self.head(F.relu(self.judge(image)).flatten(2).amax(2))
        return y

    def batch(self, rows: int, steps: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, steps, self.rnn.input_size),)

    def loss(self, *batch: Tensor) -> Tensor:
        y: Tensor = self(*batch)
        return F.binary_cross_entropy_with_logits(y, torch.ones_like(y))


SECOND_HALF: tuple[type[Model], ...] = (
    TabularAutoencoder, Graph, Siamese, Volumes, BilinearMatch, ManyTasks, Shuffling, Dense,
    Translator, SqueezeExcite, PositionedEncoder, GatedExperts, SuperResolution, RotaryWindows,
    ProjectedGenerator,
)  # fmt: skip
