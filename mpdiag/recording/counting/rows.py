"""Raw rows, wherever they were counted, and how they become histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpdiag.numerics.histograms import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.recording.counting import cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray


class Packed:
    """Rows of counts that are zero but for one stretch, which is kept alone.

    A tensor spans some 25 of FP32's 255 powers of two: a model of thousands of layers would
    otherwise hold, fault in and clear 8 KB for each of its tensors in each step.

    Args:
        width: Length of a row.
        tail: So many entries at a row's end are kept whatever they are.
    """

    def __init__(self, width: int, tail: int = 0) -> None:
        self._width = width
        self._tail = tail
        self._rows: list[tuple[int, NDArray[np.int64], NDArray[np.int64], Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: NDArray[np.int64], beside: Any = None) -> int:
        """Keep a row, int64 (width,), and what belongs to it; returns its number."""
        body = self._width - self._tail
        first, stop = cpu.occupied(row, body)
        self._rows.append((first, row[first:stop].copy(), row[body:].copy(), beside))
        return len(self._rows) - 1

    def beside(self) -> list[Any]:
        """What belongs to each row, in their order."""
        return [row[3] for row in self._rows]

    def __getitem__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Some rows as they were, int64 (n, width)."""
        rows = np.zeros((len(indices), self._width), np.int64)
        body = self._width - self._tail
        for row, i in zip(rows, indices, strict=True):
            first, stretch, tail, _ = self._rows[i]
            row[first : first + len(stretch)] = stretch
            row[body:] = tail
        return rows


@dataclass(frozen=True, eq=False)
class RawRows:
    """Counted rows, read to the host.

    Attributes:
        counts: int64 (n, ``cpu.RAW``).
        extremes: float64 (n, 2): largest and smallest non-zero finite |x|; 0 and infinity if none.
        facts: int64 (m, ``cpu.UPDATE``), of m weight updates.
        ratios: int64 (m, ``cpu.RATIO_BINS``).
    """

    counts: NDArray[np.int64] | Packed
    extremes: NDArray[np.float64]
    facts: NDArray[np.int64]
    ratios: NDArray[np.int64] | Packed

    def merged(self, groups: list[list[int]]) -> ExponentHistogram:
        """A stack of histograms, each the sum of the raw rows its group names."""
        first = np.fromiter((rows[0] for rows in groups), np.int64, len(groups))
        counts, extremes = self.counts[first], self.extremes[first]
        for i, rows in enumerate(groups):
            if len(rows) > 1:  # the rare case: a module called several times in a step
                counts[i] = self.counts[rows].sum(0)
                extremes[i] = self.extremes[rows, 0].max(), self.extremes[rows, 1].min()
        highest, lowest = extremes[:, 0], extremes[:, 1]
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

    def read(self) -> RawRows:
        """All rows counted since the last ``clear``; good until the next one."""

    def clear(self) -> None:
        """Forget all rows and start anew."""
