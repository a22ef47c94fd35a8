"""Raw rows of any device, and how they become histograms."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.numerics.histograms import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.recording.counting import layout


@dataclass(frozen=True, eq=False)
class RawRows:
    """Counted rows, read to the host.

    Attributes:
        counts: int64 (n, ``layout.RAW``).
        extremes: float64 (n, 2): largest and smallest non-zero finite |x|; 0 and infinity if none.
        facts: int64 (m, ``layout.UPDATE``), of m weight updates.
        ratios: int64 (m, ``layout.RATIO_BINS``).
    """

    counts: NDArray[np.int64]
    extremes: NDArray[np.float64]
    facts: NDArray[np.int64]
    ratios: NDArray[np.int64]

    def merged(self, groups: list[list[int]]) -> ExponentHistogram:
        """A stack of histograms, each the sum of the raw rows its group names.

        Bins at either end that hold nothing in any of them are left out.

        Args:
            groups: Numbers of rows, at least one a group.
        """
        rows = np.fromiter(itertools.chain.from_iterable(groups), np.int64)
        first, counts, sums, rest = _binned(self.counts[rows])
        highest, lowest = self.extremes[rows].T
        if len(rows) > len(groups):  # a module was called several times in a step
            starts = np.cumsum([0, *map(len, groups)])[:-1]
            counts, sums, rest = (np.add.reduceat(a, starts) for a in (counts, sums, rest))
            highest = np.maximum.reduceat(highest, starts)
            lowest = np.minimum.reduceat(lowest, starts)
        raw = dict(zip(_REST, rest.T, strict=True))
        if first == 0:
            # The lowest bin was counted together with the subnormals; what remains is 2^-126 itself.
            counts[:, 0] -= raw[layout.SUBNORMALS]
            sums[:, 0] = counts[:, 0] * 2.0**-126
        return ExponentHistogram(
            first=MIN_EXPONENT + first,
            counts=counts,
            sums=sums,
            zeros=raw[layout.ZEROS],
            subnormals=raw[layout.SUBNORMALS],
            infs=raw[layout.INFS],
            nans=raw[layout.NANS],
            fp16_overflow=raw[layout.FP16_OVERFLOW],
            absmax=highest,
            absmin=lowest,
        )


_REST = range(layout.QUARTERS, layout.RAW)
_QUARTER_MIDDLES = 1.0 + (np.arange(4) + 0.5) / 4
_BIN_SCALES = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=np.float64))


def _binned(
    raw: NDArray[np.int64],
) -> tuple[int, NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Raw rows as bins, without those at either end that hold nothing in any of them.

    Returns:
        The number of the first bin, counts int64 and sums float64 (n, bins), and what follows the
        quarters, int64 (n, 5).
    """
    occupied = np.flatnonzero(raw[:, : layout.QUARTERS].any(0)) >> 2
    first, stop = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (0, 1)
    quarters = raw[:, 4 * first : 4 * stop].reshape(len(raw), stop - first, 4)
    sums = (quarters @ _QUARTER_MIDDLES) * _BIN_SCALES[first:stop]
    return first, quarters.sum(-1), sums, raw[:, layout.QUARTERS :]


class Rows(Protocol):
    """Raw rows of one device."""

    def count(self, values: torch.Tensor, repeat: int, zeros: int) -> int:
        """Count a flat, dense tensor ``repeat`` times plus ``zeros`` zeros; returns the row."""

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """Count tensors as ``count`` does, on a device together; returns their rows."""

    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """Count weight updates, on a device together; returns the rows of weights, updates and facts.

        Args:
            pairs: Flat, dense weights before and after a step, of equal length.
        """

    def read(self) -> RawRows:
        """All rows counted since the last ``clear``; good until the next one."""

    def clear(self) -> None:
        """Forget all rows and start anew."""
