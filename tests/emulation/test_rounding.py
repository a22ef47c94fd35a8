"""Rounding to FP8: exact on any device, in every floating dtype."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mpdiag.emulation import rounding
from mpdiag.numerics.formats import FORMATS, FP8_E4M3, FP8_E5M2


def test_no_power_function_of_the_device_is_called(monkeypatch):
    inexact = Mock(side_effect=AssertionError("a GPU's power function need not be exact"))
    for name in ("ldexp", "pow", "exp2"):
        monkeypatch.setattr(torch, name, inexact)
    values = torch.tensor([1.06, 300.0, -(2.0**-10), -0.0, 2.0**127, 2.0**-149])
    found = rounding.round_to(values, FP8_E5M2)
    assert found.tolist()[:4] == [1.0, 320.0, -(2.0**-10), 0.0]
    assert found[4:].tolist() == [torch.inf, 0.0]
    assert found[3].signbit()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_that_of_the_format(name):
    fmt = FORMATS[name]
    exponents = torch.arange(-149, 128).double().exp2().float()
    x = torch.cat([exponents * f for f in (1.0, 1.03125, 1.0625, 1.21, 1.9999)])
    x = torch.cat([x, -x, torch.tensor([0.0, math.inf, -math.inf, math.nan, 464.0, 65520.0])])
    expected = fmt.round(x.numpy())
    np.testing.assert_array_equal(rounding.round_to(x, fmt).double().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    values = torch.tensor([1.0625, 3.5, -0.015625], dtype=dtype)
    found = rounding.round_to(values, FP8_E4M3)
    assert found.dtype == dtype
    assert found.tolist() == [1.0, 3.5, -0.015625]
    if dtype == torch.float64:  # what only it holds is out of range
        values = torch.tensor([1e300, -1e300, 1e-300], dtype=dtype)
        assert rounding.round_to(values, FP8_E5M2).tolist() == [torch.inf, -torch.inf, 0.0]
