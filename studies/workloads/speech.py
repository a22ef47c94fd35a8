"""Speech: a small DeepSpeech 2 on generated utterances.

The utterances are generated, not recorded: each is a spectrogram of 20 frequency bands with two to
five of ten invented syllables. A syllable is two resonances that glide, each in its
own way, for seven to eleven frames, with pauses between; a speaker shifts all of them, and noise is
added. The network reads frames and must write syllables without knowing when each was said; that is what
connectionist temporal classification (CTC) is for.

The model has the parts of DeepSpeech 2 (Amodei et al., 2015): 2-D convolutions over frequency and
time with batch norm, bidirectional GRUs, a row convolution that looks a few frames ahead, CTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads.protocol import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DeepSpeech", "RowConvolution", "Speech", "edit_distance", "utterances"]

SYLLABLES = 10  # numbered from 1; 0 is CTC's blank
BANDS, FRAMES, MOST = 20, 72, 5
TEST_UTTERANCES = 200

# size -> utterances in a batch, channels, hidden units, GRU layers
SIZES = {"small": (32, 8, 32, 1), "large": (128, 32, 512, 3)}


class Utterances(NamedTuple):
    """N utterances and what they say."""

    sound: Tensor
    """[N, 1, 20, 72]: loudness by band and frame."""
    said: Tensor
    """[N, 5]: syllables from 1 to 10, then zeros."""
    length: Tensor
    """[N]: how many syllables."""


@lru_cache(maxsize=1)
def _resonances() -> Tensor:
    """Where each syllable's two resonances begin and end, in bands: [10, 2, (begin, end)]."""
    low, high = (1.5, 4.0, 7.0), (10.0, 13.5, 17.0)
    glides = [(a, b) for a in range(3) for b in range(3)] + [(1, 1)]
    tracks = [[(low[a], low[b]), (high[b], high[a])] for a, b in glides[:-1]]
    return torch.tensor([*tracks, [(4.0, 1.5), (17.0, 17.0)]])


def utterances(count: int, generator: torch.Generator) -> Utterances:
    """`count` new utterances, decided by the generator alone."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    length = torch.randint(2, MOST + 1, (count,), generator=generator)
    said = torch.randint(1, SYLLABLES + 1, (count, MOST), generator=generator)
    said = said * (torch.arange(MOST) < length[:, None])
    lasting, pause = uniform(7, 11, MOST), uniform(1, 3, MOST)
    begin = (pause + lasting).cumsum(1) - lasting
    # How far each frame is into each syllable, from 0 to 1: [N, syllable, frame]
    into = (torch.arange(FRAMES) - begin[..., None]) / lasting[..., None]
    sounding = (into >= 0) & (into <= 1) & (said > 0)[..., None]
    track = _resonances()[(said - 1).clamp(min=0)]  # [N, syllable, 2, (begin, end)]
    centre = torch.lerp(track[..., 0, None], track[..., 1, None], into[:, :, None])
    centre = centre + uniform(-1, 1, 1, 1, 1)  # the speaker
    distance = torch.arange(BANDS)[:, None] - centre.unsqueeze(3)  # [N, syllable, 2, band, frame]
    loud = (-((distance / 0.8) ** 2)).exp() * uniform(0.6, 1.2, MOST, 1, 1, 1)
    sound = (loud.sum(2) * sounding.unsqueeze(2)).sum(1, keepdim=True)
    noise = 0.25 * torch.randn(sound.shape, generator=generator)
    return Utterances(sound + noise, said, length)


class RowConvolution(nn.Module):
    """Each feature's weighted sum over this frame and the next ones, as in DeepSpeech 2."""

    def __init__(self, features: int, ahead: int = 2) -> None:
        super().__init__()
        self.ahead = ahead
        self.rows = nn.Conv1d(features, features, ahead + 1, groups=features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, features] to the same shape."""
        y: Tensor = self.rows(F.pad(x.transpose(1, 2), (0, self.ahead)))
        return y.transpose(1, 2)


class DeepSpeech(nn.Module):
    """Two convolutions that halve time, bidirectional GRUs, a row convolution, a linear layer."""

    def __init__(self, channels: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.listen = nn.Sequential(
            nn.Conv2d(1, channels, (5, 5), stride=(2, 2), padding=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, (5, 5), stride=(2, 2), padding=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.gru = nn.GRU(
            channels * BANDS // 4, hidden, layers, batch_first=True, bidirectional=True
        )
        self.row = RowConvolution(2 * hidden)
        self.output = nn.Linear(2 * hidden, SYLLABLES + 1)
        # CTC starts by writing only blanks; making blanks unlikely shortens that phase.
        with torch.no_grad():
            self.output.bias[0] = -4.0

    def forward(self, sound: Tensor) -> Tensor:
        """The logits [B, 18, 11] of the spectrograms [B, 1, 20, 72]."""
        features = self.listen(sound).flatten(1, 2).transpose(1, 2)
        logits: Tensor = self.output(F.relu(self.row(self.gru(features)[0])))
        return logits


def edit_distance(a: list[int], b: list[int]) -> int:
    """The fewest insertions, deletions and substitutions that make b of a (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


@dataclass(frozen=True)
class Speech(Workload):
    """The speech recogniser: CTC, Adam with cosine decay, clipped gradients."""

    name: ClassVar[str] = "speech"
    title: ClassVar[str] = "Speech, a small DeepSpeech 2"
    summary: ClassVar[str] = (
        "Convolutions and GRUs learn by CTC to write down generated utterances."
    )
    family: ClassVar[str] = "speech recognition (DeepSpeech 2)"
    default_steps: ClassVar[int] = 450
    metric: ClassVar[str] = "syllable error rate"
    higher_is_better: ClassVar[bool] = False
    margin: ClassVar[float] = 0.02
    clip_norm: ClassVar[float | None] = 5.0

    size: Literal["small", "large"] = "small"
    """32 utterances and one GRU of 32 units, or 128 and three of 512."""
    learning_rate: float = 1e-2

    def model(self) -> nn.Module:
        """A `DeepSpeech` with fresh weights."""
        return DeepSpeech(*SIZES[self.size][1:])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam with torch's defaults."""
        return Adam(model.parameters(), self.learning_rate)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Spectrograms [B, 1, 20, 72], syllables [B, 5] and their number [B] of new utterances."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield tuple(utterances(SIZES[self.size][0], generator))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """CTC: minus the log-likelihood of an utterance by its length, the mean over the batch."""
        sound, said, length = batch
        chances = model(sound).log_softmax(2).transpose(0, 1)
        frames = torch.full_like(length, chances.shape[0])
        return F.ctc_loss(chances, said, frames, length)

    def score(self, model: nn.Module) -> float:
        """Edits between what was written and what was said, by syllables said; 200 utterances."""
        device = next(model.parameters()).device
        sound, said, length = utterances(TEST_UTTERANCES, torch.Generator().manual_seed(10**6))
        best = model(sound.to(device)).argmax(2).cpu()
        edits = 0
        for row, truth, count in zip(best, said, length, strict=True):
            written = [s for s in torch.unique_consecutive(row).tolist() if s]  # blanks drop out
            edits += edit_distance(written, truth[:count].tolist())
        return edits / int(length.sum())
