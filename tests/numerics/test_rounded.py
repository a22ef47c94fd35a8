"""What BF16 values say of the values before rounding, against every FP32 value that is at an edge."""

import numpy as np
import pytest
import torch

from mpdiag.analysis.layers import Layers
from mpdiag.analysis.scaling.loss_scale import largest_admissible
from mpdiag.analysis.scaling.necessity import LARGEST_EXPONENT, MATTERS, Losses
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack
from mpdiag.numerics.rounded import SUM_RATIO, before, lost_before, overflow_before


def bf16(values):
    return torch.tensor(values, dtype=torch.float32).bfloat16().float().numpy()


@pytest.fixture(scope="module")
def edges():
    """Each positive finite BF16 value, with the smallest and the largest FP32 value rounded to it."""
    patterns = np.arange(1, 0x7F80, dtype=np.int64)
    odd = patterns & 1
    low = (patterns << 16) - 0x8000 + odd
    high = (patterns << 16) + 0x7FFF + (1 - odd)
    values, low, high = (p.astype(np.uint32).view(np.float32) for p in (patterns << 16, low, high))
    # Between them lies every FP32 value that rounds there: their neighbours do not.
    assert np.array_equal(bf16(low), values)
    assert np.array_equal(bf16(high), values)
    beyond = bf16(np.nextafter(high, np.float32(np.inf)))
    assert np.array_equal(beyond, np.append(values[1:], np.float32(np.inf)))
    return values, low, high


def test_the_values_before_rounding_are_those_between_two_ties(edges):
    for value, low, high in zip(*edges, strict=True):
        least, most = before(float(value), BF16)
        assert least <= low <= high <= most
        # A tie is the end itself, and FP32's neighbour of an end that is not rounded there.
        assert np.nextafter(low, np.float32(0)) <= least
        assert np.nextafter(high, np.float32(np.inf)) >= most


NEAR = {FP16: (-30, 18), FP8_E4M3: (-14, 11), FP8_E5M2: (-22, 18)}
"""Powers of two around the values that a format makes 0 or infinite."""


def one_by_one(values):
    return stack(ExponentHistogram.of([v]) for v in values)


@pytest.mark.parametrize("fmt", NEAR, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("k", [0, 7, -3])
def test_counts_lie_within_the_bounds_for_every_value(edges, fmt, k):
    first, last = NEAR[fmt]
    inside = (edges[0] >= 2.0 ** (first - k)) & (edges[0] <= 2.0 ** (last - k))
    values, *ends = (part[inside] for part in edges)
    h = one_by_one(values)
    lost, over = lost_before(h, fmt, k), overflow_before(h, fmt, k)
    assert (np.asarray(lost.upper) - lost.lower).sum() <= 128  # values: one bin alone is open
    assert np.asarray(over.lower).sum() > 0
    for end in ends:
        scaled = np.ldexp(end.astype(np.float64), k)
        true = fmt.round(scaled) == 0
        assert ((lost.lower <= true) & (true <= lost.upper)).all()
        true = np.array([fmt.overflows(x) for x in scaled])
        assert ((over.lower <= true) & (true <= over.upper)).all()


def test_a_range_of_scales_holds_what_each_of_them_holds(edges):
    values = edges[0][(edges[0] >= 2.0**-12) & (edges[0] <= 2.0**10)]
    h = one_by_one(values)
    wide = [lost_before(h, FP8_E4M3, -2, 3), overflow_before(h, FP8_E4M3, -2, 3)]
    for k in range(-2, 4):
        for one, all_ in zip(
            (lost_before(h, FP8_E4M3, k), overflow_before(h, FP8_E4M3, k)), wide, strict=True
        ):
            assert (np.asarray(all_.lower) <= one.lower).all()
            assert (np.asarray(one.upper) <= all_.upper).all()


def test_the_largest_scale_is_within_its_bounds_for_every_value(edges):
    for value, *ends in zip(*(part[::7] for part in edges), strict=True):
        if not 2.0**-40 < value < 2.0**20:
            continue
        least, most = before(float(value), BF16)
        low, high = (largest_admissible(x, FP16) for x in (most, least))
        assert low == largest_admissible(float(value), FP16)  # no smaller than of the rounded value
        assert high - low == (np.frexp(value)[0] == 0.5)  # open for powers of two alone
        assert all(low <= largest_admissible(float(x), FP16) <= high for x in ends)


def layers_of(*tensors):
    names = np.array([f"layer{i}" for i in range(len(tensors))], object)
    h = stack(map(counted, tensors))
    return Layers(np.full(len(names), "activation_grad", object), names, h, np.ones(len(names)))


def counted(values):
    """A histogram as a recorder keeps it: means of quarters of bins, in 255 steps."""
    h = ExponentHistogram.of(values)
    mantissa, exponent = np.frexp(np.abs(values.astype(np.float64)))
    top = mantissa == 0.5  # the upper end of a bin
    bins = np.where(top, exponent - 2, exponent - 1)
    quarter = np.where(top, 3, np.ceil((2 * mantissa - 1) * 4) - 1)
    middle = 1 + (np.maximum(quarter, 0) + 0.5) / 4
    sums = np.bincount(bins - h.first, middle, minlength=h.counts.size)
    means = np.round((sums / np.maximum(h.counts, 1) - 1) * 255) / 255 + 1
    scales = np.exp2(h.exponents.astype(float))
    return ExponentHistogram(
        **{**vars(h), "sums": np.where(h.counts > 0, h.counts * means * scales, 0)}
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_scale_is_within_its_bounds(seed):
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.5, 6, 20)
    tensors = [
        np.exp2(rng.normal(-26 + 3 * rng.normal(), s, 4000)).astype(np.float32) for s in spread
    ]
    # Values at the edges of quarters and of bins, just above where rounding takes them back.
    edges = np.exp2(np.arange(-34, -16, dtype=np.float64))[:, None] * [1, 1.25, 1.5, 1.75]
    tensors.append((edges * (1 + 2.0**-10)).ravel().astype(np.float32))
    tensors.append((edges * (1 - 2.0**-11)).ravel().astype(np.float32))
    for x in tensors:
        b = bf16(x)
        rounded, true = (Losses.of([layers_of(v)], (), FP16) for v in (b, x))
        low = rounded.first_below(MATTERS * SUM_RATIO) - 1
        high = rounded.first_below(MATTERS / SUM_RATIO)
        assert low <= true.first_below(MATTERS) <= high
        assert high - low <= 5 or high == LARGEST_EXPONENT
