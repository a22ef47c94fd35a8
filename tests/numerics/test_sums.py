"""Sums in narrow formats, against torch's own additions and exact ones."""

from fractions import Fraction

import pytest
import torch

from mpdiag.numerics.sums import BITS, growing, sum_bound

EQUAL = {
    dtype: (1 + torch.arange(1 << (bits - 1)) / (1 << (bits - 1))).to(getattr(torch, dtype))
    for dtype, bits in BITS.items()
}
"""A value of each mantissa."""


@pytest.mark.parametrize("dtype", BITS)
def test_equal_values_stop_growing_where_torch_stops(dtype):
    few, many = growing(dtype)
    total, taken = EQUAL[dtype].clone(), torch.ones(EQUAL[dtype].numel(), dtype=torch.int64)
    for _ in range(many + 1):
        after = total + EQUAL[dtype]
        taken += after != total
        total = after
    assert (int(taken.min()), int(taken.max())) == (few, many)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_no_sum_is_off_by_more_than_the_bound(dtype, ranks):
    generator = torch.Generator().manual_seed(ranks)
    fp32 = torch.randn(ranks, 200, generator=generator)
    fp32[:, :50] = fp32[:1, :50].abs() * 1.001  # alike: these sums are off the most
    total = torch.zeros(200, dtype=getattr(torch, dtype))
    for row in fp32.to(total.dtype):
        total = total + row
    for at in range(200):
        exact = sum(Fraction(float(x)) for x in fp32[:, at])
        size = sum(abs(Fraction(float(x))) for x in fp32[:, at])
        off = abs(Fraction(float(total[at])) - exact) / size
        assert off <= sum_bound(dtype, ranks)


def test_the_bound_grows_until_nothing_is_known():
    assert sum_bound("bfloat16", 1) == pytest.approx(2**-8 / (1 - 2**-8))
    assert sum_bound("bfloat16", 256) == float("inf")
    assert sum_bound("float16", 256) == pytest.approx(1 / 7)
