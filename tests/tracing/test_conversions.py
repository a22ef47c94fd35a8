"""Conversions from FP32 to FP32, which run no operation, are seen where they are written."""

from __future__ import annotations

import pytest
import torch

from mpdiag.tracing import conversions


class Noted:
    """Numbers tensors by identity, and keeps what it is told."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.told: list[int | None] = []

    def mark(self) -> int:
        return 0

    def asked(self, tensor) -> int:
        if not any(t is tensor for t in self.kept):
            self.kept.append(tensor)
        return next(i for i, t in enumerate(self.kept) if t is tensor)

    def converted(self, tensor, follows, since, frame) -> None:
        self.told.append(follows)


def seen(function):
    """What a function of two tensors is told of: 0 for x, 1 for z, None for FP32."""
    x, z = torch.ones(3), torch.ones(3)
    noted = Noted()
    noted.asked(x)
    noted.asked(z)
    mode = conversions.Conversions(noted)
    conversions.push_lowest(mode)
    mode.on = True
    try:
        function(x, z)
    finally:
        mode.on = False
        conversions.take_off(mode)
    return noted.told


def by_variable(x, z):
    dtype = z.dtype
    y = x + 1
    return y.to(dtype)


def passed_on(x, z):
    return given(x, z.dtype)


def given(x, dtype):
    return x.to(dtype)


def unknown(x, _z):
    return x.to(STORED)


STORED = torch.float32

CASES = {
    "float()": (lambda x, z: x.float(), [None]),
    "to(torch.float32)": (lambda x, z: x.to(torch.float32), [None]),
    "to(z.dtype)": (lambda x, z: x.to(z.dtype), [1]),
    "to(z)": (lambda x, z: x.to(z), [1]),
    "type_as(z)": (lambda x, z: x.type_as(z), [1]),
    "a variable": (by_variable, [1]),
    "an argument": (passed_on, [1]),
    "arange(dtype=)": (lambda x, z: torch.arange(3, dtype=z.dtype), [1]),
    "softmax in FP32 and back": (
        lambda x, z: torch.softmax(x, -1, dtype=torch.float32).to(z.dtype),
        [None, 1],
    ),
    "to(device)": (lambda x, z: x.to("cpu"), []),
    "a constant of the module": (unknown, []),
}


@pytest.mark.parametrize("case", CASES)
def test_whose_dtype_it_is(case):
    function, expected = CASES[case]
    assert seen(function) == expected


def test_results_are_the_same_and_the_stack_is_left_as_it_was():
    x = torch.ones(3)
    depth = torch._C._len_torch_function_stack()
    noted = Noted()
    mode = conversions.Conversions(noted)
    with torch.device("cpu"):  # a mode of the user's, left while ours is below it
        conversions.push_lowest(mode)
        mode.on = True
        assert x.to(torch.float32) is x
    conversions.take_off(mode)
    assert torch._C._len_torch_function_stack() == depth
    assert noted.told == [None]
