"""Block formats as values: the names there are, what changes them, and what does not fit."""

from dataclasses import replace

import pytest

from mpdiag.numerics.block_formats import BLOCK_FORMATS, block_format
from mpdiag.numerics.formats import ELEMENTS, FP8_E4M3

NVFP4 = BLOCK_FORMATS["nvfp4"]


NAMES = """
fp8_e4m3     fp8_e4m3  tensor       fp32  None
fp8_e5m2     fp8_e5m2  tensor       fp32  None
fp8_tensor   fp8_e4m3  tensor       fp32  None
fp8_row      fp8_e4m3  row          fp32  None
fp8_1x128    fp8_e4m3  (1,_128)     fp32  None
fp8_128x128  fp8_e4m3  (128,_128)   fp32  None
mxfp8_e4m3   fp8_e4m3  (1,_32)      e8m0  rceil
mxfp8_e5m2   fp8_e5m2  (1,_32)      e8m0  rceil
mxfp6_e3m2   fp6_e3m2  (1,_32)      e8m0  rceil
mxfp6_e2m3   fp6_e2m3  (1,_32)      e8m0  rceil
mxfp4        fp4_e2m1  (1,_32)      e8m0  rceil
nvfp4        fp4_e2m1  (1,_16)      e4m3  None
nvfp4_te     fp4_e2m1  (1,_16)      e4m3  None
"""


def test_a_name_says_element_block_and_scale():
    for row in NAMES.strip().splitlines():
        name, element, block, scale, rounding = row.split()
        fmt = block_format(name.upper())
        assert (fmt.name, fmt.element.name, fmt.scale) == (name, element, scale)
        assert str(fmt.block) == block.replace("_", " ")
        assert (str(fmt.scale_rounding), fmt.tensor_scale) == (rounding, scale == "e4m3")
        assert (fmt.rounding, fmt.four_over_six) == ("nearest", False)
        assert fmt.element in ELEMENTS
        assert fmt == BLOCK_FORMATS[name]
    assert len(NAMES.split()) == 5 * len(BLOCK_FORMATS)


def test_options_change_the_part_they_name():
    assert block_format("mxfp4", scale_rounding="even").scale_rounding == "even"
    assert block_format("fp8_row", power_of_two=True).scale == "fp32_power_of_two"
    assert block_format("nvfp4", block="16x16").block == (16, 16)
    assert block_format("nvfp4", block="row").block == "row"
    assert block_format("nvfp4", rounding="stochastic").rounding == "stochastic"
    four = block_format("nvfp4", four_over_six=True)
    assert (four.four_over_six, four.chain) == (True, "transformer_engine")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mxfp5", {}, "mxfp6_e3m2"),
        ("nvfp4", {"scale_rounding": "floor"}, "E8M0"),
        ("mxfp4", {"scale_rounding": "round"}, "rceil"),
        ("mxfp4", {"rounding": "up"}, "stochastic"),
        ("mxfp4", {"power_of_two": True}, "FP32"),
        ("mxfp4", {"four_over_six": True}, "E4M3"),
        ("fp8_row", {"four_over_six": True}, "E4M3"),
        ("nvfp4", {"block": "16"}, "rows x columns"),
        ("nvfp4", {"block": "0x16"}, "at least one row"),
        ("nvfp4", {"block": "-1x16"}, "rows x columns"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        block_format(name, **options)


@pytest.mark.parametrize(
    "parts",
    [
        {"scale": "fp32"},  # and a scale of the tensor
        {"scale": "e8m0", "tensor_scale": False},  # rounded how?
        {"four_over_six": True},  # by torchao's chain
        {"four_over_six": True, "chain": "transformer_engine", "element": FP8_E4M3},
        {"chain": "transformer_engine", "tensor_scale": False},
        {"scale": "e5m2"},
        {"chain": "cutlass"},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts):
    with pytest.raises(ValueError, match=r"scale|chain"):
        replace(NVFP4, **parts)
