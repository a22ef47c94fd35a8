"""Exponent histograms: how many values of a tensor lie in each power of two.

The one idea the whole project stands on: multiplying a tensor by 2^k moves its histogram by k bins
and changes nothing else. So one FP32 recording answers, for every format and every power-of-two
loss scale at once, what would be lost.

Bin e covers the half-open interval (2^e, 2^(e+1)], closed at the *top*. A format turns x into 0
exactly when |x| ≤ 2^z (a tie at 2^z goes to the even neighbour, 0), and z is an integer; so every
bin is lost whole or kept whole, ties included, and the count lost to zero is exact. What a bin
cannot say exactly comes as a bound, and ``Bounded.exact`` tells the two apart.

What is exact, what is bounded:

* lost to zero: exact, unless the threshold lies among FP32's subnormals (BF16 and TF32 at scale 1,
  or FP16 scaled by more than 2^100), which are one count without exponents;
* overflow: exact in FP16 at the recorded scale, and wherever the threshold does not fall inside an
  occupied bin; else a bound;
* below the smallest normal value: a bound, as 2^min_exponent itself is normal but shares a bin
  with smaller values;
* Σ|x| and Σx² of a range of bins: estimates with rigorous bounds (see ``SUM_ERROR``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpdiag.numerics.formats import FP16, FloatFormat

if TYPE_CHECKING:
    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

MIN_EXPONENT = -127
"""Lowest bin: (2^-127, 2^-126], which holds 2^-126 alone, as FP32's subnormals are counted apart."""
MAX_EXPONENT = 127
"""Highest bin: (2^127, 2^128)."""
BINS = MAX_EXPONENT - MIN_EXPONENT + 1

SUM_ERROR = 0.125 + 1 / 255
"""Largest error of a bin's mean |x| / 2^e, as an absolute figure in a range of 1 to 2.

Values are counted in quarters of a bin, each taken at its middle (at most 1/8 off), and the mean is
stored in 255 steps. So Σ|x| of a bin is known within 13 % in the worst case, far better in practice.
"""


@dataclass(frozen=True)
class Bounded:
    """A figure and the interval that certainly holds it; arrays where histograms are stacked.

    Attributes:
        value: The best estimate; the figure itself where it is exact.
        lower: Certain lower bound.
        upper: Certain upper bound.
    """

    value: Any
    lower: Any
    upper: Any

    @property
    def exact(self) -> bool:
        """Whether lower and upper bound agree everywhere."""
        return bool(np.all(np.asarray(self.lower) == np.asarray(self.upper)))


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """One histogram, or a stack of them: every field has the same leading shape, written `batch`.

    Attributes:
        first: Exponent of the first bin.
        counts: int64, batch + (bins,): values with 2^(first+i) < |x| ≤ 2^(first+i+1).
        sums: float64, batch + (bins,): Σ|x| per bin, an estimate within ``SUM_ERROR``.
        zeros: int64, batch: values that are ±0.
        subnormals: int64, batch: FP32 subnormals, 0 < |x| < 2^-126 as recorded.
        infs: int64, batch: ±infinity.
        nans: int64, batch: NaN.
        fp16_overflow: int64, batch: finite |x| ≥ 65520 as recorded.
        absmax: float64, batch: largest finite |x|, 0 if there is none.
        absmin: float64, batch: smallest non-zero finite |x|, infinity if there is none.
    """

    first: int
    counts: Ints
    sums: Floats
    zeros: Ints
    subnormals: Ints
    infs: Ints
    nans: Ints
    fp16_overflow: Ints
    absmax: Floats
    absmin: Floats

    @classmethod
    def empty(cls, *batch: int, first: int = MIN_EXPONENT, bins: int = BINS) -> ExponentHistogram:
        """An empty histogram, or a stack of them."""

        def none() -> Ints:
            return np.zeros(batch, np.int64)

        return cls(
            first=first,
            counts=np.zeros((*batch, bins), np.int64),
            sums=np.zeros((*batch, bins)),
            zeros=none(),
            subnormals=none(),
            infs=none(),
            nans=none(),
            fp16_overflow=none(),
            absmax=np.zeros(batch),
            absmin=np.full(batch, np.inf),
        )

    @classmethod
    def of(cls, values: ArrayLike) -> ExponentHistogram:
        """Count an array in plain numpy: the slow reference for the fast counters.

        Args:
            values: Any shape. float64 is counted as it is; other dtypes are converted to float32.
        """
        x = np.asarray(values)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            x = np.abs(x.astype(np.float64 if x.dtype == np.float64 else np.float32)).ravel()
            x = x.astype(np.float64)
        nans, infs, zeros = np.isnan(x), np.isinf(x), x == 0
        finite = x[~(nans | infs | zeros)]
        normal = finite[finite >= 2.0**-126]
        # normal = mantissa * 2^exponent, mantissa in [0.5, 1)
        mantissa, exponent = np.frexp(normal)
        bin_exponent = np.where(mantissa == 0.5, exponent - 2, exponent - 1)
        index = np.clip(bin_exponent, MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT
        return cls(
            first=MIN_EXPONENT,
            counts=np.bincount(index, minlength=BINS).astype(np.int64),
            sums=np.bincount(index, weights=normal, minlength=BINS).astype(np.float64),
            zeros=np.asarray(np.count_nonzero(zeros)),
            subnormals=np.asarray(finite.size - normal.size),
            infs=np.asarray(np.count_nonzero(infs)),
            nans=np.asarray(np.count_nonzero(nans)),
            fp16_overflow=np.asarray(np.count_nonzero(finite >= FP16.overflow_threshold)),
            absmax=np.asarray(finite.max(initial=0.0)),
            absmin=np.asarray(finite.min(initial=np.inf)),
        )

    # -- reading -----------------------------------------------------------------------------------

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading shape: () for one histogram, (n,) for a stack of n."""
        return self.zeros.shape

    @property
    def exponents(self) -> Ints:
        """Exponent e of each bin (2^e, 2^(e+1)], shape (bins,)."""
        return np.arange(self.first, self.first + self.counts.shape[-1])

    @property
    def finite_nonzero(self) -> Ints:
        """Values that are finite and not 0."""
        total: Ints = self.counts.sum(-1) + self.subnormals
        return total

    @property
    def nonzero(self) -> Ints:
        """Values other than ±0, with infinities and without NaN."""
        return self.finite_nonzero + self.infs

    @property
    def finite(self) -> Ints:
        """Finite values, zeros included."""
        return self.finite_nonzero + self.zeros

    @property
    def numel(self) -> Ints:
        """All elements."""
        return self.finite + self.infs + self.nans

    def __getitem__(self, index: Any) -> ExponentHistogram:
        """Index a stack as numpy does: one histogram, or part of the stack."""
        return replace(self, **{name: getattr(self, name)[index] for name in _PER_TENSOR})

    # -- algebra -----------------------------------------------------------------------------------

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """The histogram of both tensors together."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        both = self, other
        first = min(h.first for h in both)
        last = max(h.first + h.counts.shape[-1] for h in both)
        a, b = (_widened(h, first, last) for h in both)
        added = {name: getattr(a, name) + getattr(b, name) for name in _ADDED}
        return replace(
            a, **added, absmax=np.maximum(a.absmax, b.absmax), absmin=np.minimum(a.absmin, b.absmin)
        )

    def merged(self, axis: int = 0) -> ExponentHistogram:
        """Merge a stack along one of its leading axes."""
        if not -len(self.batch) <= axis < len(self.batch):
            raise ValueError(f"a stack of shape {self.batch} has no axis {axis}")
        axis %= len(self.batch)
        added = {name: getattr(self, name).sum(axis) for name in _ADDED}
        return replace(
            self,
            **added,
            absmax=self.absmax.max(axis, initial=0.0),
            absmin=self.absmin.min(axis, initial=np.inf),
        )

    # -- what a format would lose ------------------------------------------------------------------

    def lost_to_zero(self, fmt: FloatFormat, scale_exponent: int = 0) -> Bounded:
        """How many non-zero values become 0 in ``fmt`` after multiplication by 2^scale_exponent.

        A count. Exact unless the threshold lies among the FP32 subnormals.
        """
        z = fmt.zero_exponent - scale_exponent
        binned = self.counts[..., : max(0, z - self.first)].sum(-1)
        threshold = _exp2(z)
        all_lost = (threshold >= 2.0**-126) | (self.absmax <= threshold)
        none_lost = self.absmin > threshold
        lower = binned + np.where(all_lost, self.subnormals, 0)
        upper = binned + np.where(none_lost, 0, self.subnormals)
        # absmin itself, at least, is lost when it is a subnormal at or under the threshold.
        some = (~none_lost) & (self.subnormals > 0) & ~all_lost
        lower = lower + some
        return Bounded(lower, lower, upper)

    def below_normal(self, fmt: FloatFormat, scale_exponent: int = 0) -> Bounded:
        """How many non-zero values fall below ``fmt``'s smallest normal value, zeroed ones included.

        A count; a bound, as the smallest normal value 2^m shares its bin with what is below it.
        """
        m = fmt.min_exponent - scale_exponent
        upper = self.counts[..., : max(0, m - self.first)].sum(-1) + self.subnormals
        lower = self.counts[..., : max(0, m - 1 - self.first)].sum(-1)
        lower = lower + np.where(_exp2(m) >= 2.0**-126, self.subnormals, 0)
        lower = np.where(self.absmax < _exp2(m), upper, lower)
        upper = np.where(self.absmin >= _exp2(m), 0, upper)
        return Bounded(upper, np.minimum(lower, upper), upper)

    def overflow(self, fmt: FloatFormat, scale_exponent: int = 0) -> Bounded:
        """How many finite values leave ``fmt``'s range after multiplication by 2^scale_exponent.

        A count. Exact for FP16 at the scale of the recording, and whenever no occupied bin holds
        the threshold; else a bound, tightened by the exact maximum.
        """
        if fmt is FP16 and scale_exponent == 0:
            return Bounded(self.fp16_overflow, self.fp16_overflow, self.fp16_overflow)
        threshold = _ldexp(fmt.overflow_threshold, -scale_exponent)
        mantissa, exponent = math.frexp(threshold)
        # The bin (2^e, 2^(e+1)] that holds the threshold; where it is a power of two (FP32, TF32 and
        # BF16 overflow just under 2^128) that is the bin it closes.
        holding = exponent - 2 if mantissa == 0.5 else exponent - 1
        certain = self.counts[..., max(0, holding + 1 - self.first) :].sum(-1)
        inside = holding - self.first
        possible = certain
        if 0 <= inside < self.counts.shape[-1]:
            possible = certain + self.counts[..., inside]
        reached = self.absmax >= threshold if fmt.tie_overflows else self.absmax > threshold
        lower = np.where(reached, np.maximum(certain, 1), certain)
        upper = np.where(reached, possible, 0)
        return Bounded(lower, np.minimum(lower, upper), upper)

    def abs_sum(self, upto: int | None = None) -> Bounded:
        """Σ|x| over the finite values, or over those in bins below exponent ``upto``.

        Args:
            upto: Count only |x| ≤ 2^upto, for example a format's ``zero_exponent``.
        """
        counts, means, scale = self._means(upto)
        small = self._subnormal_sum(1, upto)
        value = (counts * means * scale).sum(-1)
        lower = (counts * np.maximum(1.0, means - SUM_ERROR) * scale).sum(-1)
        upper = (counts * np.minimum(2.0, means + SUM_ERROR) * scale).sum(-1)
        return Bounded(value + small / 2, lower, upper + small)

    def energy(self, upto: int | None = None) -> Bounded:
        """Σx² over the finite values, or over those in bins below exponent ``upto``.

        For values in (1, 2] of mean m, the mean square lies between m² (Jensen) and 3m - 2 (the
        chord of the parabola); the estimate is the middle, the bounds include ``SUM_ERROR``.
        """
        counts, means, scale = self._means(upto)
        scale = scale * scale
        small = self._subnormal_sum(2, upto)
        low = np.maximum(1.0, means - SUM_ERROR)
        high = np.minimum(2.0, means + SUM_ERROR)
        value = (counts * (means * means + 3 * means - 2) / 2 * scale).sum(-1)
        lower = (counts * low * low * scale).sum(-1)
        upper = (counts * (3 * high - 2) * scale).sum(-1)
        return Bounded(value + small / 4, lower, upper + small)

    def _means(self, upto: int | None) -> tuple[Ints, Floats, Floats]:
        """Counts, mean |x| / 2^e in [1, 2] and 2^e of the bins below ``upto``."""
        stop = self.counts.shape[-1] if upto is None else max(0, upto - self.first)
        counts = self.counts[..., :stop]
        scale = np.exp2(self.exponents[:stop].astype(np.float64))
        means = self.sums[..., :stop] / np.maximum(counts, 1) / scale
        return counts, np.clip(means, 1.0, 2.0), scale

    def _subnormal_sum(self, power: int, upto: int | None) -> Floats:
        """Upper bound of Σ|x|^power over the FP32 subnormals."""
        edge = -126 if upto is None else min(-126, upto)
        result: Floats = self.subnormals.astype(np.float64) * _exp2(edge) ** power
        return result


_ADDED = ("counts", "sums", "zeros", "subnormals", "infs", "nans", "fp16_overflow")
_PER_TENSOR = (*_ADDED, "absmax", "absmin")


def stack(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """Stack single histograms into one of batch shape (n,), over a common range of exponents."""
    items = list(histograms)
    if not items:
        return ExponentHistogram.empty(0)
    first = min(h.first for h in items)
    last = max(h.first + h.counts.shape[-1] for h in items)
    items = [_widened(h, first, last) for h in items]
    stacked: dict[str, Any] = {
        name: np.stack([getattr(h, name) for h in items]) for name in _PER_TENSOR
    }
    return replace(items[0], **stacked)


def _widened(h: ExponentHistogram, first: int, last: int) -> ExponentHistogram:
    before, after = h.first - first, last - h.first - h.counts.shape[-1]
    if before == after == 0:
        return h
    pad = [(0, 0)] * len(h.batch) + [(before, after)]
    return replace(h, first=first, counts=np.pad(h.counts, pad), sums=np.pad(h.sums, pad))


def _exp2(exponent: int) -> float:
    return _ldexp(1.0, exponent)


def _ldexp(x: float, exponent: int) -> float:
    """math.ldexp that goes to infinity instead of raising."""
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.inf
