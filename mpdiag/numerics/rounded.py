"""What rounded values say of the values before rounding: of a BF16 recording, what its operations had.

Rounding to nearest keeps the order of values, and every power of two is a BF16 number. So with b the
rounded value of x, and 2^z a power of two, x ≤ 2^z gives b ≤ 2^z, and b < 2^z gives x < 2^z. Only values
with b = 2^z are open: counts of bins are off by those at a bin's upper edge, and by no others.
"""

import math
from dataclasses import replace

import numpy as np

from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import Bounded, ExponentHistogram

SUM_RATIO = (11 / 9 * (1 + 1 / 255)) ** 2
"""Largest ratio of two shares of Σ|x|, before and after rounding, if both are taken from histograms.

A value is counted at the middle of its quarter of a bin, and rounding may carry it into the next one:
from 9/8 to 11/8 at most. The mean of a bin is stored in 255 steps. Both enter the sum and the whole.
"""


def before(rounded: float, fmt: FloatFormat) -> tuple[float, float]:
    """The smallest and the largest magnitude that a format rounds to a positive finite value of its own.

    Whether a tie itself rounds to it depends on the value; the ends are ties.
    """
    exponent = max(math.frexp(rounded)[1] - 1, fmt.min_exponent)
    quantum = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    lowest_of_binade = rounded == math.ldexp(1.0, exponent) and exponent > fmt.min_exponent
    return rounded - quantum / (4 if lowest_of_binade else 2), rounded + quantum / 2


def lost_before(
    h: ExponentHistogram, fmt: FloatFormat, low: int = 0, high: int | None = None
) -> Bounded:
    """How many non-zero values became 0 in ``fmt`` before they were rounded to BF16.

    Those that BF16 itself rounded to 0 are not in the histogram as non-zero values.

    Args:
        h: Of rounded values.
        fmt: The format.
        low: log2 of the smallest scale that the values may have had.
        high: log2 of the largest one; None: the same.
    """
    most = h.lost_to_zero(fmt, low)
    least = h.lost_to_zero(fmt, (low if high is None else high) + 1)
    return Bounded(most.value, least.lower, most.upper)


def overflow_before(
    h: ExponentHistogram, fmt: FloatFormat, low: int = 0, high: int | None = None
) -> Bounded:
    """How many finite values left ``fmt``'s range before they were rounded to BF16; as above."""
    highest = low if high is None else high
    edge = math.ceil(math.log2(fmt.overflow_threshold)) - low  # 2^edge and beyond overflows
    certain = h.counts[..., max(0, edge - h.first) :].sum(-1)
    # A value just below the threshold may be the rounded one of a value above it.
    reach = replace(h, absmax=h.absmax * (1 + 2.0**-8))
    most = np.maximum(reach.overflow(fmt, highest).upper, certain)
    return Bounded(h.overflow(fmt, low).value, certain, most)
