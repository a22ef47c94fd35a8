"""Counts against torch's own casts: equality, ties included."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpdiag.numerics.formats import FORMATS, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack

BITS = st.integers(0, 2**32 - 1)
POWERS = st.integers(-45, 20).map(lambda e: int(np.float32(2.0**e).view(np.uint32)))
NEAR = st.tuples(POWERS, st.integers(-1, 1)).map(sum)  # powers of two and their neighbours
ARRAYS = hnp.arrays(np.uint32, st.integers(0, 60), elements=st.one_of(NEAR, BITS, st.just(0)))


def values(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def cast(x: np.ndarray, fmt, k: int) -> tuple[np.ndarray, np.ndarray]:
    """x·2^k, and the same through torch's cast; both float64."""
    product = torch.from_numpy(x).double() * 2.0**k
    stored = product.float().to(getattr(torch, fmt.torch_name)).double()
    return product.numpy(), stored.numpy()


@pytest.mark.parametrize("fmt", [FP16, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
@given(bits=ARRAYS, k=st.integers(-20, 40))
def test_values_lost_to_zero_equal_torchs_cast(fmt, bits, k):
    x = values(bits)
    x = x[np.isfinite(x) & (np.abs(x) < 2.0**80)]
    product, stored = cast(x, fmt, k)
    lost = ExponentHistogram.of(x).lost_to_zero(fmt, k)
    assert lost.exact
    assert lost.value == np.count_nonzero((product != 0) & (stored == 0))


@given(bits=ARRAYS)
def test_overflow_of_fp16_at_scale_1_equals_torchs_cast(bits):
    x = values(bits)
    x = x[np.isfinite(x)]
    over = ExponentHistogram.of(x).overflow(FP16)
    assert over.exact
    assert over.value == torch.from_numpy(x).half().isinf().sum().item()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@given(bits=ARRAYS, k=st.integers(-20, 40))
def test_bounds_hold_the_truth_of_every_format(fmt, bits, k):
    x = values(bits)
    x = x[np.isfinite(x)].astype(np.float64)
    x = x[np.abs(x) < 2.0**80]
    h = ExponentHistogram.of(x.astype(np.float32))
    product = np.abs(x * 2.0**k)
    zeroed = np.count_nonzero((product > 0) & (fmt.round(product) == 0))
    beyond = np.count_nonzero([fmt.overflows(v) for v in product])
    small = np.count_nonzero((product > 0) & (product < fmt.smallest_normal))
    for bound, truth in (
        (h.lost_to_zero(fmt, k), zeroed),
        (h.overflow(fmt, k), beyond),
        (h.below_normal(fmt, k), small),
    ):
        assert bound.lower <= truth <= bound.upper


@given(bits=ARRAYS, upto=st.one_of(st.none(), st.integers(-30, 10)))
def test_sums_and_energies_lie_within_their_bounds(bits, upto):
    x = values(bits)
    x = x[np.isfinite(x) & (np.abs(x) < 2.0**60)]
    h = ExponentHistogram.of(x)
    part = np.abs(x.astype(np.float64))
    part = part if upto is None else part[part <= 2.0**upto]
    for bound, truth in ((h.abs_sum(upto), part.sum()), (h.energy(upto), (part**2).sum())):
        slack = 1e-12 * (1 + truth)
        assert bound.lower - slack <= truth <= bound.upper + slack


@given(first=ARRAYS, second=ARRAYS)
def test_merging_is_counting_both_together(first, second):
    a, b = values(first), values(second)
    merged = ExponentHistogram.of(a) + ExponentHistogram.of(b)
    both = ExponentHistogram.of(np.concatenate([a, b]))
    stacked = stack([ExponentHistogram.of(a), ExponentHistogram.of(b)]).merged()
    for h in (merged, stacked):
        assert np.array_equal(h.counts, both.counts)
        for name in ("zeros", "subnormals", "infs", "nans", "fp16_overflow", "absmax", "absmin"):
            assert getattr(h, name) == getattr(both, name)
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = both + 1
