"""Language model: a projected LSTM with a wide softmax on real English, after bigLSTM.

The paper's bigLSTM (Józefowicz et al., 2016) trains on a billion words with a vocabulary of 793,471,
projected LSTMs, sampled softmax and Adagrad, and needs a loss scale of 128. This is that design at
the size of a CPU: one LSTM of 128 cells projected to 64, a vocabulary of 8,000 words, 5,120 tokens a
step, on the English that ships with Python (`english.py`).

Nothing here is unusual, yet FP16 without a scale loses: the loss is a mean over N tokens, so
the gradient of a logit that is *not* the next word is p / N, which at the start is
1 / (8,000 · 5,120) = 2^-25.3. FP16 makes it 0. The gradients that push wrong words down are
lost, and only the gradient that pushes the right word up remains. (The paper's sampled softmax would
make each p larger. The paper's Adagrad needs more steps than this training has.)
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mpdiag.workloads import english
from mpdiag.workloads.protocol import Batch, DataSplit, Workload

_WORD = re.compile(r"[a-z]+|[0-9]|[^a-z0-9\s]")
LENGTH = 20  # consecutive words to predict
TEST_WINDOWS = 400

# size -> vocabulary, windows a step, cells, projection, layers
SIZES = {"small": (8_000, 256, 128, 64, 1), "large": (16_000, 1024, 1024, 256, 2)}


@lru_cache(maxsize=2)
def split(part: DataSplit) -> tuple[str, ...]:
    """The part's words in lower case; digits and marks stand alone."""
    return tuple(w for text in english.documents(part) for w in _WORD.findall(text.lower()))


@lru_cache(maxsize=4)
def vocabulary(size: int) -> dict[str, int]:
    """The `size` − 1 most frequent words of the training part, from 1; ties go by the alphabet."""
    counted = sorted(Counter(split("train")).items(), key=lambda item: (-item[1], item[0]))
    return {word: index for index, (word, _) in enumerate(counted[: size - 1], start=1)}


@lru_cache(maxsize=4)
def words_of(part: DataSplit, size: int) -> Tensor:
    """The part as indices into a vocabulary of `size` words, [N]."""
    known = vocabulary(size)
    return torch.tensor([known.get(word, english.UNKNOWN) for word in split(part)])


class ProjectedLstm(nn.Module):
    """An embedding, LSTMs whose states are projected to fewer features, a linear layer."""

    def __init__(self, vocabulary: int, cells: int, projection: int, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, projection)
        self.lstm = nn.LSTM(projection, cells, layers, proj_size=projection, batch_first=True)
        self.output = nn.Linear(projection, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """The logits [B, T, vocabulary] of the word after each of the words [B, T]."""
        embedded = self.embedding(words)
        # oneDNN has no projections, and would warn before falling back. (torch.backends' own way
        # to switch it off warns, too, of TF32 on Intel's GPUs.)
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            states = self.lstm(embedded)[0]
        finally:
            torch._C._set_mkldnn_enabled(before)
        logits: Tensor = self.output(states)
        return logits


@dataclass(frozen=True)
class LanguageModel(Workload):
    """The language model: cross entropy of the next word, clipped gradients."""

    name: ClassVar[str] = "language_model"
    title: ClassVar[str] = "Language model, a projected LSTM"
    summary: ClassVar[str] = (
        "A projected LSTM learns to predict the next word of Python's own documentation."
    )
    family: ClassVar[str] = "language modelling (bigLSTM)"
    default_steps: ClassVar[int] = 60
    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    margin: ClassVar[float] = 4.0
    paper_scale: ClassVar[float | None] = 128.0
    clip_norm: ClassVar[float | None] = 1.0

    size: Literal["small", "large"] = "small"
    """8,000 words and 5,120 tokens a step, or 16,000 and 20,480 with two larger layers."""

    def model(self) -> nn.Module:
        """A `ProjectedLstm` with fresh weights."""
        vocabulary, _, cells, projection, layers = SIZES[self.size]
        return ProjectedLstm(vocabulary, cells, projection, layers)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam at a rate of 0.004."""
        return Adam(model.parameters(), 4e-3)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Words [B, 20] and the words after each [B, 20]."""
        vocabulary, count, *_ = SIZES[self.size]
        text = words_of("train", vocabulary)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            pieces = english.windows(text, count, LENGTH + 1, generator)
            yield pieces[:, :-1], pieces[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, the mean over every position."""
        words, targets = batch
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    def score(self, model: nn.Module) -> float:
        """The perplexity of 8,000 words of held-out text, over the whole vocabulary."""
        device = next(model.parameters()).device
        text = words_of("test", SIZES[self.size][0])
        pieces = english.windows(text, TEST_WINDOWS, LENGTH + 1, torch.Generator().manual_seed(0))
        losses = [
            F.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten())
            for part in pieces.to(device).split(100)
        ]
        return math.exp(float(torch.stack(losses).mean()))
