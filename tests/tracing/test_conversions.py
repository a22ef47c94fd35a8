"""Conversions from FP32 to FP32, which run no operation, are seen where they are written."""

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
    mode.attach()
    mode.on = True
    try:
        function(x, z)
    finally:
        mode.on = False
        mode.detach()
    return noted.told


def by_variable(x, z):
    dtype = z.dtype
    y = x + 1
    return y.to(dtype)


def passed_on(x, z):
    return given(x, z.dtype)


def given(x, dtype):
    return x.to(dtype)


class Holder:
    """A module that keeps a dtype, or gives that of a tensor of its own."""

    def __init__(self, z) -> None:
        self.fixed = torch.float32
        self.kept = None
        self.weight = z

    @property
    def dtype(self):
        return first_dtype([self.weight])


def first_dtype(tensors):
    return next(t.dtype for t in tensors)


def by_fixed_attribute(x, z):
    holder = Holder(z)
    return x.to(holder.fixed)


def by_kept_attribute(x, z):
    holder = Holder(z)
    holder.kept = z.dtype
    y = x + 1
    return read_back(holder, y)


def read_back(holder, y):
    return y.to(holder.kept)


def by_property(x, z):
    holder = Holder(z)
    return x.to(dtype=holder.dtype)


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
    "an attribute that is fixed": (by_fixed_attribute, [None]),
    "an attribute that keeps another's": (by_kept_attribute, [1]),
    "a property that gives a parameter's": (by_property, [1]),
    "a device and FP32": (lambda x, z: x.to(x.device, torch.float32), [None]),
    "to(device)": (lambda x, z: x.to("cpu"), []),
    "a constant of the module": (lambda x, z: x.to(STORED), []),
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
        mode.attach()
        mode.on = True
        assert x.to(torch.float32) is x
    mode.detach()
    assert torch._C._len_torch_function_stack() == depth
    assert noted.told == [None]


def test_the_default_device_stays_at_the_bottom_of_the_stack():
    """Torch looks for it there when it is changed."""
    mode = conversions.Conversions(Noted())
    torch.set_default_device("cpu")
    mode.attach()
    torch.set_default_device(None)
    mode.detach()
    assert torch._C._len_torch_function_stack() == 0
