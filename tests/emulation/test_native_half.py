"""Emulated FP16 beside torch's own half kernels of the CPU, as far as these add in FP32.

A product of two FP16 values is exact in FP32. A kernel that adds K of them in FP32 and rounds once is
within half a unit in the last place of the exact sum, and K units of FP32 of the sum of the products'
sizes. What adds in FP16 is far outside: so a kernel shows by itself whether it is a witness.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mpdiag.emulation.mode import Emulation

K = 2048


def half(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


# Name: how many products are added, the operation, and what it is given (all positive).
KERNELS = {
    "mm": (K, torch.mm, (half(16, K), half(K, 16))),
    "mm of a transposed matrix": (K, lambda a, b: a.t() @ b, (half(K, 16), half(K, 16))),
    "addmm": (K, torch.addmm, (half(16), half(16, K), half(K, 16))),
    "linear": (K, F.linear, (half(16, K), half(16, K), half(16))),
    "linear of one row": (K, F.linear, (half(1, K), half(16, K))),
    "bmm": (K, torch.bmm, (half(2, 16, K), half(2, K, 16))),
    "baddbmm": (K, torch.baddbmm, (half(2, 16, 16), half(2, 16, K), half(2, K, 16))),
    "mv": (K, torch.mv, (half(16, K), half(K))),
    "dot": (K, torch.dot, (half(K), half(K))),
    "conv1d": (1536, F.conv1d, (half(2, 512, 20), half(8, 512, 3))),
    "conv2d": (2304, F.conv2d, (half(1, 256, 9, 9), half(8, 256, 3, 3))),
    "conv3d": (1728, F.conv3d, (half(1, 64, 5, 5, 5), half(4, 64, 3, 3, 3))),
    "sum": (K, lambda x: x.sum(1), (half(16, K),)),
    "mean": (K, lambda x: x.mean(1), (half(16, K),)),
}
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


def emulated(name):
    _, call, given = KERNELS[name]
    with Emulation():
        return call(*given)


@pytest.mark.parametrize("name", KERNELS)
def test_emulated_fp16_is_within_a_unit_of_a_native_kernel_that_adds_in_fp32(name):
    ours = emulated(name)
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
