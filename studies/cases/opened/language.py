"""Language models on the text of Python's help."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import cosine, cross_entropy, draws, fixed, letters, rows, words


class LetterModel(nn.Module):
    """The next letter, by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(28, 24)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.head = nn.Linear(48, 28)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embed(x))[0])
        return logits


def windows(series: Tensor, length: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Symbols and their successors, [B, length] each."""
    found = series[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def letters_gru(seed: int) -> Training:
    torch.manual_seed(seed)
    series = letters()
    train, held = series[:-20_000], series[-20_000:]
    model = LetterModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(index: int) -> Tensor:
        x, y = windows(train, 12, rows(len(train) - 13, 24, seed, index))
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    x, y = windows(held, 12, torch.arange(0, 19_000, 80))
    return Training(model, optimizer, loss, cross_entropy(model, x, y), clip_norm=1.0)


class WordModel(nn.Module):
    """The next word from three words before it, with the table of words used twice."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.mix = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(F.gelu(self.mix(self.embed(x).flatten(-2))))
        return F.linear(h, self.embed.weight, self.bias)


def words_large_vocabulary(seed: int) -> Training:
    torch.manual_seed(seed)
    series = words(2000)
    count = len(series) - 4
    model = WordModel(2000, 16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def batch(starts: Tensor) -> tuple[Tensor, Tensor]:
        return series[starts[:, None] + torch.arange(3)], series[starts + 3]

    def loss(index: int) -> Tensor:
        x, y = batch(rows(count - 4000, 256, seed, index))
        return F.cross_entropy(model(x), y)

    x, y = batch(torch.arange(count - 4000, count, 8))
    return Training(model, optimizer, loss, cross_entropy(model, x, y))


class RotaryAttention(nn.Module):
    """One head whose queries and keys are turned by their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("speeds", 10_000.0 ** -(torch.arange(0, width, 2) / width))
        self.speeds: Tensor

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.einsum("bt,f->btf", positions, self.speeds)
        a, b = x.chunk(2, -1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.turn(q, positions) @ self.turn(k, positions).transpose(1, 2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (scores / math.sqrt(x.shape[-1])).masked_fill(hidden, -math.inf)
        mixed: Tensor = self.out(scores.softmax(-1) @ v)
        return mixed


class RotaryModel(nn.Module):
    """Which symbol stood a given number of places ago, somewhere in a long document."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.norm = nn.LayerNorm(width)
        self.attention = RotaryAttention(width)
        self.norm2 = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(self.norm(h), positions)
        logits: Tensor = self.head(self.norm2(h))
        return logits


def _look_back(seed: int, furthest: int) -> Training:
    """The symbol five places ago, in pieces of documents up to ``furthest`` symbols long."""
    torch.manual_seed(seed)
    model = RotaryModel(12, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(12, (size, 20), generator=generator)
        start = torch.randint(furthest, (size, 1), generator=generator)
        return x, start.float() + torch.arange(20)

    def entropy(x: Tensor, positions: Tensor) -> Tensor:
        logits = model(x, positions)[:, 5:]
        return F.cross_entropy(logits.flatten(0, 1), x[:, :-5].flatten())

    def loss(index: int) -> Tensor:
        return entropy(*batch(draws(seed, index), 24))

    def evaluate() -> float:
        with torch.no_grad():
            return float(entropy(*batch(fixed(3), 200)))

    return Training(
        model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 250, 25), clip_norm=1.0
    )


def rotary_long_documents(seed: int) -> Training:
    return _look_back(seed, 16_000)


def rotary_short_documents(seed: int) -> Training:
    return _look_back(seed, 8)


CASES = (
    Case(
        "letters_gru",
        "A GRU that foretells letters of Python's help.",
        120,
        letters_gru,
        "cross entropy",
        False,
        0.15,
    ),
    Case(
        "words_large_vocabulary",
        "The next of 2000 words of Python's help, one table for both ends, by Adagrad.",
        150,
        words_large_vocabulary,
        "cross entropy",
        False,
        0.05,
    ),
    Case(
        "rotary_long_documents",
        "Rotary attention that looks five places back, at positions up to 16,000; symbols are random.",
        250,
        rotary_long_documents,
        "cross entropy",
        False,
        0.05,
    ),
    Case(
        "rotary_short_documents",
        "Rotary attention that looks five places back, at positions up to 32; symbols are random.",
        250,
        rotary_short_documents,
        "cross entropy",
        False,
        0.05,
    ),
)
