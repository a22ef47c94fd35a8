"""Raw rows, wherever they were counted, and how they become histograms."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpdiag.histogram import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.recording import cpu

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RawRows:
    """Drained rows on the host.

    Attributes:
        counts: int64 (n, ``cpu.RAW``).
        extremes: float64 (n, 2): largest and smallest non-zero finite |x|; 0 and infinity if none.
        facts: int64 (m, ``cpu.UPDATE``), of m weight updates.
        ratios: int64 (m, ``cpu.RATIO_BINS``).
    """

    counts: NDArray[np.int64]
    extremes: NDArray[np.float64]
    facts: NDArray[np.int64]
    ratios: NDArray[np.int64]

    def merged(self, groups: list[list[int]]) -> ExponentHistogram:
        """A stack of histograms, each the sum of the raw rows its group names."""
        order = np.fromiter(itertools.chain.from_iterable(groups), np.int64)
        lengths = np.fromiter(map(len, groups), np.int64, len(groups))
        counts, extremes = self.counts, self.extremes
        if len(order) == len(groups):
            counts, extremes = counts[order], extremes[order]
            highest, lowest = extremes[:, 0], extremes[:, 1]
        else:
            starts = np.cumsum(lengths) - lengths
            counts = np.add.reduceat(counts[order], starts, axis=0)
            highest = np.maximum.reduceat(extremes[order, 0], starts)
            lowest = np.minimum.reduceat(extremes[order, 1], starts)
        return _histograms(counts, highest, lowest)


_QUARTER_MIDDLES = 1.0 + (np.arange(4) + 0.5) / 4
_BIN_SCALES = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=np.float64))


def _histograms(
    raw: NDArray[np.int64], highest: NDArray[np.float64], lowest: NDArray[np.float64]
) -> ExponentHistogram:
    quarters = raw[:, : cpu.QUARTERS].reshape(len(raw), BINS, 4)
    counts = quarters.sum(-1)
    sums = (quarters @ _QUARTER_MIDDLES) * _BIN_SCALES
    # The lowest bin was counted together with the subnormals; what remains is 2^-126 itself.
    counts[:, 0] -= raw[:, cpu.SUBNORMALS]
    sums[:, 0] = counts[:, 0] * 2.0**-126
    return ExponentHistogram(
        first=MIN_EXPONENT,
        counts=counts,
        sums=sums,
        zeros=raw[:, cpu.ZEROS],
        subnormals=raw[:, cpu.SUBNORMALS],
        infs=raw[:, cpu.INFS],
        nans=raw[:, cpu.NANS],
        fp16_overflow=raw[:, cpu.FP16_OVERFLOW],
        absmax=highest,
        absmin=lowest,
    )


class Rows(Protocol):
    """Raw rows of one device."""

    def count(self, values: torch.Tensor, repeat: int, zeros: int) -> int:
        """Count a flat, dense tensor ``repeat`` times plus ``zeros`` zeros; returns the row."""

    def count_update(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int]:
        """Count a weight update; returns the rows of the weights, the updates, and its facts."""

    def drain(self) -> RawRows:
        """Hand over all rows and start anew."""
