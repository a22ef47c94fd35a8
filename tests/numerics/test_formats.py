"""Every format's limits and rounding, against torch's casts and against arithmetic by hand."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpdiag.numerics.formats import (
    BF16,
    ELEMENTS,
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    HALVES,
    TARGETS,
    TRAINABLE,
    format_named,
    half_of,
)

EVERY = pytest.mark.parametrize(
    "fmt", dict.fromkeys([*FORMATS.values(), *ELEMENTS]), ids=lambda f: f.name
)
CASTS = [fmt for fmt in FORMATS.values() if fmt.torch_name]
CAST = pytest.mark.parametrize("fmt", CASTS, ids=lambda f: f.name)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
FEW_BITS = st.builds(
    lambda sign, numerator, exponent: sign * math.ldexp(1 + numerator / 2**12, exponent),
    *(st.sampled_from([-1.0, 1.0]), st.integers(0, 2**12), st.integers(-150, 127)),
)
"""Few significant bits at every exponent: nearly all ties of the narrow formats."""


def rounded_by_hand(fmt, x: float) -> float:
    """Round to nearest, ties to even, in exact fractions: no floating point involved."""
    exact = abs(Fraction(x))
    if exact == 0:
        return x
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    while Fraction(2) ** exponent > exact:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    quantum = Fraction(2) ** (max(exponent, fmt.min_exponent) - fmt.mantissa_bits)
    steps, rest = divmod(exact, quantum)
    if rest * 2 > quantum or (rest * 2 == quantum and steps % 2 == 1):
        steps += 1
    result = steps * quantum
    beyond = {"ieee": math.inf, "nan": math.nan, "none": fmt.max}[fmt.specials]
    return math.copysign(float(result) if result <= Fraction(fmt.max) else beyond, x)


def _smallest(fmt):
    """The smallest positive value."""
    return math.ldexp(1.0, fmt.min_subnormal_exponent)


LIMITS = Path(__file__).with_name("limits_by_hand.tsv").read_text().splitlines()[1:]


@pytest.mark.parametrize("limits", LIMITS, ids=lambda row: row.partition("\t")[0])
def test_limits_by_hand(limits):
    name, *cells, _ = limits.split("\t")
    fmt = format_named(name)
    bits, mantissa, largest, normal, subnormal, threshold = map(eval, cells)
    assert (fmt.bits, fmt.mantissa_bits, fmt.max) == (bits, mantissa, largest)
    assert (fmt.min_exponent, fmt.min_subnormal_exponent) == (normal, subnormal)
    assert (fmt.smallest_normal, fmt.zero_exponent) == (2.0**normal, subnormal - 1)
    assert fmt.max_exponent == math.frexp(largest)[1] - 1
    assert fmt.overflow_threshold == threshold
    assert fmt.tie_overflows == (fmt is not FP8_E4M3)
    assert fmt.specials == ("ieee" if fmt.tie_overflows else "nan")


@EVERY
def test_the_thresholds_are_where_rounding_changes(fmt):
    # Half the smallest subnormal is a tie whose even neighbour is 0.
    tie = math.ldexp(1.0, fmt.zero_exponent)
    just_above = math.nextafter(tie, 1.0)
    assert fmt.round([tie, just_above]).tolist() == [0.0, _smallest(fmt)]
    top = fmt.overflow_threshold
    below, above = math.nextafter(top, 0.0), math.nextafter(top, math.inf)
    assert fmt.round(below) == fmt.max
    assert not fmt.overflows(below)
    assert fmt.overflows(above)
    if fmt.specials == "none":
        assert fmt.round([top, above]).tolist() == [fmt.max, fmt.max]
        return
    assert not math.isfinite(fmt.round(above))
    assert fmt.overflows(top) == (not math.isfinite(fmt.round(top)))


def test_the_formats_say_which_scale_they_need():
    assert [f for f in FORMATS.values() if f.needs_loss_scale] == [FP16]
    assert [f for f in FORMATS.values() if f.needs_tensor_scale] == [FP8_E4M3, FP8_E5M2]
    assert TARGETS == (FP16, BF16, FP8_E4M3, FP8_E5M2)
    assert HALVES == (FP16, BF16)
    assert TRAINABLE == (FP16, BF16, FP32)
    assert [half_of(f) for f in (*TARGETS, FP32)] == [FP16, BF16, FP16, FP16, FP16]


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest"),  # OCP MX v1.0, tables 2 to 5
    list(zip(ELEMENTS[2:], (28.0, 7.5, 6.0), (0.0625, 0.125, 0.5), strict=True)),
)
def test_a_format_without_special_values_saturates(fmt, largest, smallest):
    assert fmt.specials == "none"
    assert fmt.max == largest
    assert math.ldexp(1.0, fmt.min_subnormal_exponent) == smallest
    assert fmt.needs_tensor_scale
    values = [1e9, -math.inf, smallest / 2, math.nan]
    assert str(fmt.round(values).tolist()) == str([largest, -largest, 0.0, math.nan])


@EVERY
@settings(max_examples=200)
@given(x=FLOATS | FEW_BITS)
@example(x=65520.0)
@example(x=464.0)
@example(x=2.0**-25)
@example(x=3 * 2.0**-25)
@example(x=-0.0)
def test_rounding_equals_exact_fractions(fmt, x):
    found, expected = float(fmt.round(x)), rounded_by_hand(fmt, x)
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert math.isnan(found) or math.copysign(1, found) == math.copysign(1, x)


@CAST
@given(values=st.lists(FLOATS, min_size=1, max_size=20))
@example(values=[2.0**-25, 3 * 2.0**-25, (1 + 2.0**-23) * 2.0**-25, 65519.99609375, 2.0**-134])
def test_rounding_equals_torchs_casts_within_the_range(fmt, values):
    # Past the range torch's FP8 casts saturate or give NaN, by version: our table defines it.
    inside = [x for x in values if not fmt.overflows(abs(x))]
    cast = torch.tensor(inside, dtype=torch.float32).to(getattr(torch, fmt.torch_name)).double()
    assert torch.equal(torch.from_numpy(np.atleast_1d(fmt.round(inside))), cast)


@CAST
def test_every_value_of_a_format_is_left_alone(fmt):
    width = min(fmt.bits, 16)
    patterns = torch.arange(2**width, dtype=torch.int32)
    if fmt is FP32:  # its upper halves: one of each 65536 values
        held = (patterns << 16).view(torch.float32).double()
    else:
        integer = torch.uint8 if width == 8 else torch.int16
        held = patterns.to(integer).view(getattr(torch, fmt.torch_name)).double()
    finite = held[held.isfinite()].numpy()
    again = fmt.round(finite)
    assert np.array_equal(again, finite)
    assert np.array_equal(np.signbit(again), np.signbit(finite))
    assert np.abs(finite).max() <= fmt.max
    if fmt is not FP32:
        assert np.abs(finite).max() == fmt.max
        assert np.abs(finite[finite != 0]).min() == _smallest(fmt)


@EVERY
def test_what_is_not_finite_stays_so(fmt):
    rounded = fmt.round([math.inf, -math.inf, math.nan])
    if fmt.specials == "ieee":
        assert rounded[:2].tolist() == [math.inf, -math.inf]
        assert math.isnan(rounded[2])
    elif fmt.specials == "none":
        assert str(rounded.tolist()) == str([fmt.max, -fmt.max, math.nan])
    else:
        assert np.isnan(rounded).all()


def test_names():
    assert format_named("FP8_E4M3") is FP8_E4M3
    assert list(FORMATS) == ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
    with pytest.raises(ValueError, match="fp8_e5m2"):
        format_named("fp8")
