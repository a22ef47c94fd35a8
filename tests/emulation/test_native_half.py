"""Emulated FP16 beside torch's own half kernels of the CPU, as far as these add in FP32.

A product of two FP16 values is exact in FP32. A kernel that adds K of them in FP32 and rounds once is
within half a unit in the last place of the exact sum, and K units of FP32 of the sum of the products'
sizes. What adds in FP16 is far outside: so a kernel shows by itself whether it is a witness.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: F401 - the table calls it

from mpdiag.emulation.mode import Emulation

K = 2048


def half(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


TABLE = Path(__file__).with_name("kernels_of_halves.tsv").read_text().splitlines()
KERNELS = {name: [*map(eval, cells)] for name, *cells in (row.split("\t") for row in TABLE[1:])}
"""By name: how many products are added, the operation, and what it is given."""
WITNESSES = {"mm", "addmm", "linear", "conv2d"}
"""Of these at least one adds in FP32 wherever torch has half kernels."""


def exact(name):
    _, call, given = KERNELS[name]
    return call(*[x.double() for x in given])


def unit(value):
    """Of FP16, at these values."""
    exponent = torch.frexp(value).exponent - 1
    return torch.ldexp(torch.ones_like(value), exponent.clamp(min=-14) - 10)


def adds_in_fp32(name, found):
    """Whether an FP16 result is what FP32 sums give; the products' sizes add up to the exact sum."""
    truth = exact(name)
    bound = unit(truth) / 2 * (1 + 2**-10) + KERNELS[name][0] * 2.0**-23 * truth
    return bool(((found.double() - truth).abs() <= bound).all())


def native(name):
    _, call, given = KERNELS[name]
    return call(*given)


@pytest.mark.parametrize("name", KERNELS)
def test_emulated_fp16_is_within_a_unit_of_a_native_kernel_that_adds_in_fp32(name):
    with Emulation():
        ours = native(name)
    assert ours.dtype == torch.float16
    assert adds_in_fp32(name, ours)
    theirs = native(name)
    if not adds_in_fp32(name, theirs):
        pytest.skip("on this CPU torch's own half kernel adds in less than FP32")
    # Two FP32 sums in other orders may fall on the two sides of one rounding.
    assert bool(((ours.double() - theirs.double()).abs() <= unit(exact(name))).all())


def test_there_are_witnesses_and_what_adds_in_fp16_is_none():
    assert any(adds_in_fp32(name, native(name)) for name in WITNESSES)
    (x,) = KERNELS["sum"][2]
    low = torch.zeros(16).half()
    for k in range(K):
        low = low + x[:, k]
    assert not adds_in_fp32("sum", low)
