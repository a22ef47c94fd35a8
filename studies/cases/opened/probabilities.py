"""Probabilities as products, logarithms and exponentials, as textbooks write them."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import accuracy, cosine, draws, fixed, perceptron, rows, table


class HiddenMarkov(nn.Module):
    """The likelihood of a series by the forward algorithm, in probabilities."""

    def __init__(self, states: int, symbols: int) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.randn(states, states))
        self.emits = nn.Parameter(torch.randn(states, symbols))
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        moves, emits = self.moves.softmax(1), self.emits.softmax(1)
        forward = emits.T[x[:, 0]] / self.states
        for seen in x.unbind(1)[1:]:
            forward = (forward @ moves) * emits.T[seen]
        return torch.log(forward.sum(1) + 1e-37)


def markov_by_products(seed: int) -> Training:
    """Series of 24 out of eight symbols, which three hidden states emit."""
    torch.manual_seed(seed)
    model = HiddenMarkov(3, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    emits = torch.softmax(2 * torch.randn(3, 8, generator=fixed(120)), 1)

    def series(generator: torch.Generator, size: int) -> Tensor:
        state = torch.randint(3, (size,), generator=generator)
        seen = []
        for _ in range(24):
            seen.append(torch.multinomial(emits[state], 1, generator=generator)[:, 0])
            moved = torch.rand(size, generator=generator) < 0.2
            state = torch.where(moved, (state + 1) % 3, state)
        return torch.stack(seen, 1)

    def loss(index: int) -> Tensor:
        return -model(series(draws(seed, index), 32)).mean() / 24

    def evaluate() -> float:
        with torch.no_grad():
            return -float(model(series(fixed(121), 400)).mean()) / 24

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-1, 150))


class Sorter(nn.Module):
    """Ranks of eight numbers, as a doubly stochastic matrix by Sinkhorn's scaling."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.score = perceptron(1, 32, 8)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.exp(self.score(x[..., None]) / self.temperature)
        column = torch.ones(len(x), 8, 1)
        for _ in range(8):
            row = 1 / (kernel @ column)
            column = 1 / (kernel.transpose(1, 2) @ row)
        return row * kernel * column.transpose(1, 2)


def sorting_by_sinkhorn(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Sorter(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(size, 8, generator=generator)
        return 2 * x - 1, x.argsort(1).argsort(1)

    def loss(index: int) -> Tensor:
        x, rank = batch(draws(seed, index), 64)
        return F.nll_loss(torch.log(model(x) + 1e-12).flatten(0, 1), rank.flatten())

    x, rank = batch(fixed(122), 300)
    return Training(
        model, optimizer, loss, accuracy(model, x, rank), schedule=cosine(optimizer, 1e-2, 200)
    )


class Probability(nn.Module):
    """A probability, not a logit."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = perceptron(inputs, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net(x))[:, 0]


def tumours_by_written_out_entropy(seed: int) -> Training:
    """The cross entropy of probabilities, kept from log(0) by 1e-8."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("breast_cancer", 150)
    model = Probability(30)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 64, seed, index)
        p, target = model(x[chosen]), y[chosen]
        right = target * torch.log(p + 1e-8) + (1 - target) * torch.log(1 - p + 1e-8)
        return -right.mean()

    def evaluate() -> float:
        with torch.no_grad():
            return float(((model(test_x) > 0.5) == test_y).float().mean())

    return Training(model, optimizer, loss, evaluate)


class Lookup(nn.Module):
    """Attention by exponentials of scores, from which no largest one is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        weight = torch.exp(self.query(asked) @ self.key(keys).transpose(1, 2))
        found: Tensor = (weight @ values) / weight.sum(-1, keepdim=True)
        return found


def lookup_without_maximum(seed: int) -> Training:
    """The value whose key is most like what is asked, among twelve."""
    torch.manual_seed(seed)
    model = Lookup()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
        keys = torch.randn(size, 12, 8, generator=generator)
        values = torch.randn(size, 12, 4, generator=generator)
        which = torch.randint(12, (size, 3, 1), generator=generator)
        asked = keys.gather(1, which.expand(-1, -1, 8))
        return asked, keys, values, values.gather(1, which.expand(-1, -1, 4))

    def error(generator: torch.Generator, size: int) -> Tensor:
        asked, keys, values, wanted = batch(generator, size)
        return F.mse_loss(model(asked, keys, values), wanted)

    def evaluate() -> float:
        with torch.no_grad():
            return math.sqrt(float(error(fixed(123), 300)))

    return Training(
        model,
        optimizer,
        lambda index: error(draws(seed, index), 32),
        evaluate,
        schedule=cosine(optimizer, 2e-2, 300),
    )


class Padded(nn.Module):
    """One layer of attention over symbols [B, T]; 0 stands for padding."""

    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 24)
        self.place = nn.Parameter(0.1 * torch.randn(16, 24))
        self.qkv, self.norm = nn.Linear(24, 72), nn.LayerNorm(24)
        self.head = perceptron(24, 32, 8)
        self.filled = filled

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x) + self.place).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(24)
        padding = (x == 0)[:, None]
        if self.filled:
            scores = scores.masked_fill(padding, -1e9)
        else:
            scores = scores + padding.float() * -1e9
        mixed = self.norm(scores.softmax(-1) @ v)
        present = (x != 0).float()[..., None]
        logits: Tensor = self.head((mixed * present).sum(1) / present.sum(1))
        return logits


def largest_symbol(seed: int, *, filled: bool) -> Training:
    """The largest symbol of a series of 4 to 16."""
    torch.manual_seed(seed)
    model = Padded(filled=filled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, 8, (size, 16), generator=generator)
        most = torch.randint(2, 8, (size, 1), generator=generator)
        length = torch.randint(4, 17, (size, 1), generator=generator)
        x = torch.where(torch.arange(16) < length, x.clamp(max=most), 0)
        return x, x.amax(1)

    def loss(index: int) -> Tensor:
        x, largest = batch(draws(seed, index), 64)
        return F.cross_entropy(model(x), largest)

    evaluate = accuracy(model, *batch(fixed(124), 500))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 200))


CASES = (
    Case(
        "markov_by_products",
        "A hidden Markov model of generated series, by products of probabilities.",
        150,
        markov_by_products,
        "negative log likelihood a symbol",
        False,
        0.05,
    ),
    Case(
        "sorting_by_sinkhorn",
        "Ranks of eight numbers by Sinkhorn's scaling at a temperature of 0.5.",
        200,
        sorting_by_sinkhorn,
        "accuracy of a rank",
        True,
        0.05,
    ),
    Case(
        "tumours_by_written_out_entropy",
        "Breast cancer by a cross entropy that is written out, with 1e-8 in its logarithms.",
        300,
        tumours_by_written_out_entropy,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "lookup_without_maximum",
        "A value is looked up by attention whose exponentials are written out.",
        300,
        lookup_without_maximum,
        "RMSE",
        False,
        0.05,
    ),
    Case(
        "largest_symbol_filled",
        "The largest symbol of a padded series; padding is filled with -1e9.",
        200,
        partial(largest_symbol, filled=True),
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "largest_symbol_added",
        "The largest symbol of a padded series; -1e9 is added where padding is.",
        200,
        partial(largest_symbol, filled=False),
        "accuracy",
        True,
        0.04,
    ),
)
