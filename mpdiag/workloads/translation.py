"""Translation: an encoder and a decoder of LSTMs with attention put numbers from English to German.

The corpus is made by a rule, which is how both languages say numbers from 0 to 999,999. English
runs from the large to the small; German says the units before the tens and joins them by "und", so
words must be reordered over some distance:

    342,521: three hundred forty two thousand five hundred twenty one
             drei hundert zwei und vierzig tausend fünf hundert ein und zwanzig

German numbers are one long word; here they are split at their joints. Every tenth number is held
out. The model is the paper's kind: a stack of LSTMs reads, another writes, each of 3 or 5 layers with
shortcuts around them, and every position of the writer attends to all positions of the reader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads.protocol import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Translation", "Translator", "english_number", "german_number", "pairs"]

PAD, BEGIN, END = 0, 1, 2
LARGEST = 999_999
TEST_NUMBERS = 300

_ENGLISH = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_GERMAN = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn"
).split()
_GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()

ENGLISH_WORDS = ("", "<s>", "</s>", *_ENGLISH, *_ENGLISH_TENS, "hundred", "thousand")
GERMAN_WORDS = ("", "<s>", "</s>", *_GERMAN, "ein", *_GERMAN_TENS, "und", "hundert", "tausend")

# size -> numbers in a batch, width
SIZES = {"small": (128, 64), "large": (512, 512)}


def english_number(n: int) -> list[str]:
    """How English says a number from 0 to 999,999 (in American: without "and")."""
    if n >= 1000:
        return [
            *english_number(n // 1000),
            "thousand",
            *(english_number(n % 1000) if n % 1000 else ()),
        ]
    if n >= 100:
        return [_ENGLISH[n // 100], "hundred", *(english_number(n % 100) if n % 100 else ())]
    if n >= 20:
        return [_ENGLISH_TENS[n // 10 - 2], *([_ENGLISH[n % 10]] if n % 10 else ())]
    return [_ENGLISH[n]]


def german_number(n: int) -> list[str]:
    """How German says it, split at the joints; 1 is "eins" at the very end and "ein" before more."""
    return [*_german_before(n)[:-1], "eins"] if n % 100 == 1 else _german_before(n)


def _german_before(n: int) -> list[str]:
    """A number that more may follow."""
    if n >= 1000:
        return [
            *_german_before(n // 1000),
            "tausend",
            *(_german_before(n % 1000) if n % 1000 else ()),
        ]
    if n >= 100:
        return [*_german_before(n // 100), "hundert", *(_german_before(n % 100) if n % 100 else ())]
    if n >= 20:
        units = [*_german_before(n % 10), "und"] if n % 10 else []
        return [*units, _GERMAN_TENS[n // 10 - 2]]
    return ["ein" if n == 1 else _GERMAN[n]]


@lru_cache(maxsize=1)
def _lengths() -> tuple[int, int]:
    """Words of the longest English and German number, with its end."""
    numbers = (777_777, 121_121, 321_321)
    return tuple(  # type: ignore[return-value]
        1 + max(len(say(n)) for n in numbers) for say in (english_number, german_number)
    )


def _indices(sentences: Sequence[Sequence[str]], known: Sequence[str], length: int) -> Tensor:
    place = {word: i for i, word in enumerate(known)}
    rows = [[*(place[w] for w in s), END] for s in sentences]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def pairs(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The numbers as English words [N, S] and German words [N, T], each with its end, padded."""
    source, target = _lengths()
    return (
        _indices([english_number(n) for n in numbers], ENGLISH_WORDS, source),
        _indices([german_number(n) for n in numbers], GERMAN_WORDS, target),
    )


class Stack(nn.Module):
    """LSTM layers, each with a shortcut around it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(
        self, x: Tensor, states: Sequence[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Map [B, T, width] to the same shape; the states of each layer before and after."""
        after = []
        for i, layer in enumerate(self.layers):
            y, state = layer(x, None if states is None else states[i])
            x = x + y
            after.append(state)
        return x, after


class Translator(nn.Module):
    """A reader and a writer, the writer's outputs joined with what they attend to."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(len(ENGLISH_WORDS), width, padding_idx=PAD)
        self.target = nn.Embedding(len(GERMAN_WORDS), width)
        self.reader, self.writer = Stack(width, layers), Stack(width, layers)
        self.query = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, len(GERMAN_WORDS))

    def read(self, source: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Memory [B, S, width] and last states of the source words [B, S]."""
        memory, states = self.reader(self.source(source))
        return memory, states

    def write(
        self,
        target: Tensor,
        memory: Tensor,
        hidden: Tensor,
        states: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The logits [B, T, words] after each target word [B, T]; `hidden` [B, S] is padding."""
        x, after = self.writer(self.target(target), states)
        scores = self.query(x) @ memory.transpose(1, 2) / math.sqrt(memory.shape[2])
        weights = scores.masked_fill(hidden[:, None], -1e4).softmax(2)
        joined = torch.tanh(self.join(torch.cat([x, weights @ memory], dim=2)))
        return self.output(joined), after

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the word after each of `target` [B, T], for sources [B, S]."""
        memory, states = self.read(source)
        return self.write(target, memory, source == PAD, states)[0]

    def translate(self, source: Tensor, length: int) -> Tensor:
        """The likeliest word after the likeliest word before: [B, length]."""
        memory, states = self.read(source)
        word = torch.full((len(source), 1), BEGIN, device=source.device)
        written = []
        for _ in range(length):
            logits, states = self.write(word, memory, source == PAD, states)
            word = logits.argmax(2)
            written.append(word)
        return torch.cat(written, dim=1)


@dataclass(frozen=True)
class Translation(Workload):
    """The translator: cross entropy of the next word, Adam with cosine decay."""

    name: ClassVar[str] = "translation"
    title: ClassVar[str] = "Translation of numbers, LSTMs with attention"
    summary: ClassVar[str] = (
        "An encoder and a decoder of LSTMs learn to translate English numbers into German."
    )
    family: ClassVar[str] = "machine translation (encoder-decoder LSTMs, 3 or 5 layers)"
    default_steps: ClassVar[int] = 150
    metric: ClassVar[str] = "words right"
    margin: ClassVar[float] = 0.02
    clip_norm: ClassVar[float | None] = 1.0

    size: Literal["small", "large"] = "small"
    """128 numbers a step and width 64, or 512 and width 512."""
    layers: Literal[3, 5] = 3
    """LSTMs of the encoder, and as many of the decoder."""
    learning_rate: float = 4e-3

    def model(self) -> nn.Module:
        """A `Translator` with fresh weights."""
        return Translator(SIZES[self.size][1], self.layers)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam with torch's defaults."""
        return Adam(model.parameters(), self.learning_rate)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """English words [B, S] and German words [B, T] of numbers that are not held out."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            tens = torch.randint((LARGEST + 1) // 10, (SIZES[self.size][0],), generator=generator)
            units = torch.randint(
                9, tens.shape, generator=generator
            )  # those that end in 9 stay out
            yield pairs((10 * tens + units).tolist())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy of each word given those before it, the mean over all but padding."""
        source, target = batch
        begun = torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], dim=1)
        logits = model(source, begun)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)

    def score(self, model: nn.Module) -> float:
        """The share of words, ends included, that greedy translations get right at their place.

        300 held-out numbers are translated.
        """
        assert isinstance(model, Translator)
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint((LARGEST + 1) // 10, (TEST_NUMBERS,), generator=generator) * 10 + 9
        source, target = pairs(numbers.tolist())
        written = model.translate(source.to(device), target.shape[1]).cpu()
        return float((written == target)[target != PAD].float().mean())
