"""The shape rules, against the table of NVIDIA's guide."""

from dataclasses import replace

import pytest

from mpdiag.hardware.alignment import (
    Alignment,
    alignment,
    bytes_of,
    common_multiples,
    dtype_name,
    faults,
    is_sized,
    padded,
    values_in_step,
    worth_padding,
)


@pytest.mark.parametrize(
    ("dtype", "good", "best"),
    [("int8", 16, 128), ("fp16", 8, 64), ("tf32", 4, 32), ("fp64", 2, 16)],
)
def test_the_guides_table(dtype, good, best):
    assert alignment(dtype, "ampere") == alignment(dtype, None) == Alignment(good, best)
    assert alignment(dtype, "volta") == Alignment(good, good)


def test_four_bits():
    """16 bytes hold 32 values, two of which share a byte."""
    assert alignment("fp4", "blackwell") == Alignment(32, 256)
    assert (bytes_of("fp4"), bytes_of("bf16")) == (0.5, 2)
    assert not is_sized("fp6")
    assert not is_sized(None)


def test_padding():
    expected = {(33278, 8): 33280, (33280, 8): 33280, (1, 8): 8, (50257, 64): 50304}
    assert {each: padded(*each) for each in expected} == expected


def test_the_dimension_at_fault_is_named_worst_first():
    found = faults([("M", 2560), ("N", 33278), ("K", 325)], "fp16", "turing")
    assert [(f.dimension, f.size, f.multiple, f.padded) for f in found] == [
        ("K", 325, 8, 328),
        ("N", 33278, 8, 33280),
    ]
    image = faults([("input channels", 3)], "fp16", None)
    assert worth_padding([*found, *image], {}) == found  # 3 channels to 8 are too much work
    assert common_multiples([*found, replace(found[0], multiple=12)]) == {325: 24, 33278: 8}
    assert [f.padded for f in worth_padding(found, {325: 24})] == [336, 33280]
    assert faults([("N", 33280)], "fp16", None) == ()
    assert [f.padded for f in faults([("N", 33280)], "int8", None)] == []
    assert [f.padded for f in faults([("N", 33288)], "int8", None)] == [33296]


def test_values_in_a_step():
    expected = {
        (5608, "fp8_e4m3"): 8, (33278, "fp16"): 2, (33280, "fp16"): 8, (7, "fp32"): 1,
        (0, "fp16"): 0, (48, "fp4"): 16,
    }  # fmt: skip
    assert {each: values_in_step(*each) for each in expected} == expected


def test_dtypes_as_others_write_them():
    expected = {
        "float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16",
        "torch.bfloat16": "bf16", "bf16": "bf16", "f32": "fp32", "s8": "int8",
        "c10::Float8_e4m3fn": "fp8_e4m3", "signed char": "int8", "long int": None,
        "Scalar": None, "": None, None: None,
    }  # fmt: skip
    assert {text: dtype_name(text) for text in expected} == expected
