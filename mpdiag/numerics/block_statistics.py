"""What is known of values that a block format has turned, or would turn, into others.

``BlockError`` has sums over values that were quantised. ``DepthHistogram`` has counts of values by how
far they lie below their block's largest magnitude: what an MX format loses follows from it, exactly,
without quantising anything.

Source of the limits: ``mpdiag.numerics.block_formats`` (scales), ``mpdiag.numerics.formats`` (elements).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING

from mpdiag.numerics.block_formats import ScaleRounding
from mpdiag.numerics.formats import FloatFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 32
"""Values of a block of which depths are counted: those of MX formats."""
CLASS_COUNT = 8
"""Classes of blocks by the significand f, in [1, 2), of their largest magnitude: 0 is f = 1; 1 is
(1, 1.5]; 2 is (1.5, 1.75); 3 is 1.75; 4 is (1.75, 1.875); 5 is 1.875; 6 is (1.875, 1.9375); 7 is
[1.9375, 2). A rule of ``ScaleRounding`` treats all blocks of a class alike, for each MX element."""
OCTAVES = 33
"""Octaves below the top one that are counted apart; E5M2 turns into 0 what lies 32 below."""
BUCKETS = 8 + 4 * OCTAVES + 1
"""Buckets of depth. Of a block with its largest magnitude in [2^e, 2^(e+1)), bucket i is:

- 0 to 7: (2 - (i+1)/8, 2 - i/8] · 2^e, eighths of the top octave, the uppermost first;
- 8 to 139, i = 8 + 4k + j: (2 - (j+1)/4, 2 - j/4] · 2^(e-1-k), quarters of the octaves below;
- 140: everything smaller, but not 0.

Buckets hold their upper edge, as the bins of ``numerics.histograms``.
"""
SMALLEST_MAXIMUM = 2.0**-93
"""Blocks with a smaller one are counted apart: FP32's own range ends within their depths."""

Bound = tuple[int, int]
"""The smallest and the largest number that can be right; they are equal where it is exact."""


@dataclass(frozen=True)
class BlockError:
    """Sums over values x that a format turned into q. Those of several tiles are added.

    Attributes:
        values: How many.
        zeros: How many of those that the format read were not 0 and became 0.
        signal: Σx².
        error: Σ(q - x)².
        shift: Σ(q - x). Rounding without bias leaves about 0.
        along: Σ(q - x)·x. Below 0 the format shrinks values, above 0 it enlarges them.
    """

    values: int
    zeros: int
    signal: float
    error: float
    shift: float
    along: float

    def __add__(self, other: BlockError) -> BlockError:
        return BlockError(*map(add, vars(self).values(), vars(other).values()))

    @property
    def sqnr_db(self) -> float:
        """10·log10(Σx² / Σ(q - x)²): infinite without error, NaN without values other than 0."""
        if self.signal == 0.0 or math.isnan(self.error):
            return math.nan
        return 10 * math.log10(self.signal / self.error) if self.error else math.inf


@dataclass(frozen=True, eq=False)
class DepthHistogram:
    """Values by their depth below the largest magnitude of their block of 32.

    Attributes:
        counts: int64 (``CLASS_COUNT``, ``BUCKETS``): by class of the block and bucket of depth.
        zeros: Values that are 0, of blocks with a finite largest magnitude.
        nonfinite: Values of blocks that hold an infinity or a NaN, all of them.
        tiny: Values other than 0 of blocks with a largest magnitude below ``SMALLEST_MAXIMUM``.
    """

    counts: NDArray[np.int64]
    zeros: int
    nonfinite: int
    tiny: int

    def __add__(self, other: DepthHistogram) -> DepthHistogram:
        return DepthHistogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.tiny + other.tiny,
        )

    @property
    def values(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum()) + self.zeros + self.nonfinite + self.tiny

    def zeroed(self, element: FloatFormat, rule: ScaleRounding) -> Bound:
        """How many values other than 0 an MX format of this element turns into 0.

        Exact but for ``tiny`` values. Those of blocks with an infinity or a NaN are not counted.
        """
        found = sum(
            int(row[8 - 4 * (element.zero_exponent - element.max_exponent + up) :].sum())
            for row, up in self._rows(element, rule)
        )
        return found, found + self.tiny

    def clipped(self, element: FloatFormat, rule: ScaleRounding) -> Bound:
        """How many values exceed the largest value of an MX format of this element.

        Exact. Values that rounding alone would take to that largest value are counted, too. Only
        ``floor`` and ``even`` clip.
        """
        eighths = round(8 * (2 - math.ldexp(element.max, -element.max_exponent)))
        found = sum(
            int(row[: eighths - 8 * up].sum()) if not up else 0
            for row, up in self._rows(element, rule)
        )
        return found, found

    def below_normal(self, element: FloatFormat, rule: ScaleRounding) -> Bound:
        """How many values other than 0 are smaller than the element's smallest normal value.

        A bound: a bucket also holds the values on its upper edge, which are normal.
        """
        low = high = 0
        for row, up in self._rows(element, rule):
            edge = 8 - 4 * (element.min_exponent - element.max_exponent + up)
            low, high = low + int(row[edge + 1 :].sum()), high + int(row[edge:].sum())
        return low, high + self.tiny

    def _rows(
        self, element: FloatFormat, rule: ScaleRounding
    ) -> list[tuple[NDArray[np.int64], int]]:
        """Counts of each class, and 1 where its blocks' scale is 2^(e + 1) / 2^E, 0 where 2^e / 2^E."""
        first = first_raised(element, rule)
        return [(row, int(number >= first)) for number, row in enumerate(self.counts)]


def first_raised(element: FloatFormat, rule: ScaleRounding) -> int:
    """The first class of ``CLASSES`` for which a scale is one power of two above ``floor``'s."""
    if rule == "floor":
        return CLASS_COUNT
    if rule == "ceil":
        return 1
    if rule == "rceil":  # where f exceeds the significand of the element's largest value
        return {1.5: 2, 1.75: 4, 1.875: 6}[math.ldexp(element.max, -element.max_exponent)]
    # even: where f and half a unit of the element's mantissa make 2 or more
    return {1: 3, 2: 5, 3: 7}[element.mantissa_bits]
