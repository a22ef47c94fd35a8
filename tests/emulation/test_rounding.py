"""Rounding to FP8: exact on any device, in every floating dtype."""

import pytest
import torch

from mpdiag.emulation import rounding
from mpdiag.numerics.formats import FP8_E4M3, FP8_E5M2


def test_no_power_function_of_the_device_is_called(monkeypatch):
    def inexact(*_):
        raise AssertionError("a GPU's power function need not be exact")

    for name in ("ldexp", "pow", "exp2"):
        monkeypatch.setattr(torch, name, inexact)
    values = torch.tensor([1.06, 300.0, -(2.0**-10), -0.0, 2.0**127, 2.0**-149])
    found = rounding.round_to(values, FP8_E5M2)
    assert found.tolist()[:4] == [1.0, 320.0, -(2.0**-10), 0.0]
    assert found[4:].tolist() == [torch.inf, 0.0]
    assert found[3].signbit()


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    expected = [2.0**n for n in range(-126, 128)]
    assert rounding._power_of_two(exponents).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays(dtype):
    values = torch.tensor([1.0625, 3.5, -0.015625], dtype=dtype)
    found = rounding.round_to(values, FP8_E4M3)
    assert found.dtype == dtype
    assert found.tolist() == [1.0, 3.5, -0.015625]


def test_what_only_float64_holds_is_out_of_range():
    values = torch.tensor([1e300, -1e300, 1e-300], dtype=torch.float64)
    assert rounding.round_to(values, FP8_E5M2).tolist() == [torch.inf, -torch.inf, 0.0]
