"""The floating-point formats of mixed-precision training: limits, rounding and the scale each needs.

A format states its exponent bits, its mantissa bits and what its topmost bit patterns mean; every
limit follows from these by arithmetic, so no other module repeats a threshold. ``FORMATS`` is the
only registry: a new format is one entry here.

Formats with block scales (MXFP8, NVFP4) are not formats of a single value: ``block_formats`` has
them. ``ELEMENTS`` are the formats of their values; those of 6 and 4 bits are stored with a scale alone.

Sources: IEEE 754-2019 (FP32, FP16); *OCP 8-bit Floating Point Specification (OFP8)* rev. 1.0 for
E4M3 and E5M2; *OCP Microscaling Formats (MX) Specification* v1.0, section 5.3, for E3M2, E2M3 and
E2M1; NVIDIA, *Training with Mixed Precision User Guide*, section 2.1 (FP16's range).
All formats round to nearest, ties to even. TF32 here is FP32 rounded the same way to 10 mantissa
bits (hardware may round ties away from zero, which moves no threshold by more than the tie itself).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Specials = Literal["ieee", "nan", "none"]
"""What the largest exponent means: infinity and NaN alone (``ieee``); numbers, but for one NaN
pattern (``nan``, as in E4M3); numbers alone, so that values out of range saturate (``none``)."""


@dataclass(frozen=True)
class FloatFormat:
    """One binary floating-point format.

    Attributes:
        name: The name used on the command line and in files, such as ``"fp16"``.
        label: The name printed for people, such as ``"FP16"``.
        exponent_bits: Bits of the exponent, whose bias is 2^(exponent_bits - 1) - 1.
        mantissa_bits: Stored mantissa bits (the leading 1 is not stored).
        torch_name: The ``torch.dtype`` that stores it, or None where torch has none (TF32).
        specials: What the largest exponent means.
    """

    name: str
    label: str
    exponent_bits: int
    mantissa_bits: int
    torch_name: str | None
    specials: Specials = "ieee"

    @property
    def needs_tensor_scale(self) -> bool:
        """Whether each tensor is stored with a scale of its own, as in FP8."""
        return self.bits <= 8

    @property
    def needs_loss_scale(self) -> bool:
        """Whether its range is narrower than FP32's, and no tensor has a scale of its own."""
        return self.exponent_bits < 8 and not self.needs_tensor_scale

    # -- limits ------------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits of a value: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def beyond(self) -> float:
        """What rounding makes of a positive value out of range: infinity, NaN or ``max``."""
        return {"ieee": math.inf, "nan": math.nan, "none": self.max}[self.specials]

    @cached_property
    def max_exponent(self) -> int:
        """Exponent e of the binade [2^e, 2^(e+1)) that holds the largest finite value."""
        bias = (1 << self.exponent_bits - 1) - 1
        return bias if self.specials == "ieee" else bias + 1

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, 2^min_exponent."""
        return 2 - (1 << self.exponent_bits - 1)

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        patterns = 2 if self.specials == "nan" else 1  # the last pattern of all may be NaN
        significand = 2.0 - math.ldexp(patterns, -self.mantissa_bits)
        return math.ldexp(significand, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest positive value, 2^min_subnormal_exponent."""
        return self.min_exponent - self.mantissa_bits

    @property
    def zero_exponent(self) -> int:
        """z such that a non-zero x becomes 0 exactly when |x| ≤ 2^z.

        Half the smallest subnormal is a tie, and the even neighbour of that tie is 0.
        """
        return self.min_subnormal_exponent - 1

    @cached_property
    def overflow_threshold(self) -> float:
        """Half-way between ``max`` and the value that would follow it: where overflow begins."""
        ulp = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        return self.max + ulp / 2

    @cached_property
    def tie_overflows(self) -> bool:
        """Whether ``overflow_threshold`` itself overflows: it does where ``max`` is odd.

        True for FP16, BF16 and E5M2; False for E4M3, whose last pattern is NaN, so that its
        largest value 448 is even and takes the tie at 464.
        """
        ulp = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        return int(self.max / ulp) % 2 == 1

    def overflows(self, magnitude: float) -> bool:
        """Whether rounding a finite |x| of this size leaves the format's finite range."""
        if self.tie_overflows:
            return magnitude >= self.overflow_threshold
        return magnitude > self.overflow_threshold

    def round(self, values: ArrayLike) -> NDArray[np.float64]:
        """Round to this format, ties to even.

        What is out of range becomes ±inf, NaN where the format has no infinity, and ±``max`` where it
        has neither. NaN stays NaN.

        Args:
            values: Any shape; taken as float64, so results are exact for float32 inputs.

        Returns:
            float64 of the same shape, every element representable in this format.
        """
        import numpy as np

        x = np.asarray(values, dtype=np.float64)
        magnitude = np.abs(x)
        finite = np.isfinite(x)
        safe = np.where(finite & (magnitude > 0), magnitude, 1.0)
        exponent = np.maximum(np.frexp(safe)[1] - 1, self.min_exponent)
        quantum = np.ldexp(1.0, exponent - self.mantissa_bits)
        rounded = np.copysign(np.rint(np.where(finite, magnitude, 0.0) / quantum) * quantum, x)
        rounded = np.where(np.abs(rounded) > self.max, np.copysign(self.beyond, x), rounded)
        infinite = np.isinf(x)
        return np.where(infinite, np.copysign(self.beyond, x), np.where(finite, rounded, np.nan))


FP32 = FloatFormat("fp32", "FP32", 8, 23, "float32")
TF32 = FloatFormat("tf32", "TF32", 8, 10, None)
FP16 = FloatFormat("fp16", "FP16", 5, 10, "float16")
BF16 = FloatFormat("bf16", "BF16", 8, 7, "bfloat16")
FP8_E4M3 = FloatFormat("fp8_e4m3", "FP8 E4M3", 4, 3, "float8_e4m3fn", specials="nan")
FP8_E5M2 = FloatFormat("fp8_e5m2", "FP8 E5M2", 5, 2, "float8_e5m2")
FP6_E3M2 = FloatFormat("fp6_e3m2", "FP6 E3M2", 3, 2, None, specials="none")
FP6_E2M3 = FloatFormat("fp6_e2m3", "FP6 E2M3", 2, 3, None, specials="none")
FP4_E2M1 = FloatFormat("fp4_e2m1", "FP4 E2M1", 2, 1, None, specials="none")

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FP32, TF32, FP16, BF16, FP8_E4M3, FP8_E5M2)}

ELEMENTS = (FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)
"""The formats of a value that shares its scale with others."""
TARGETS = tuple(f for f in FORMATS.values() if f.bits <= 16)
"""The formats a training can aim at: those that take half of FP32's memory, or less."""
HALVES = tuple(f for f in TARGETS if not f.needs_tensor_scale)
"""The targets that tensors are stored in as they are, without a scale of their own."""
STORED_IN = {str(f.torch_name): f for f in HALVES}
"""These by the name of their ``torch.dtype``."""
TRAINABLE = (*HALVES, FP32)
"""The formats the trainer runs in."""


def half_of(target: FloatFormat) -> FloatFormat:
    """The format of whatever is stored without a scale of its own when training aims at ``target``.

    That is the target itself, or FP16 beside FP8 matrix products.
    """
    return target if target in HALVES else FP16


def format_named(name: str) -> FloatFormat:
    """Look a format up by name, in any case.

    Raises:
        ValueError: If there is no such format; the message lists those there are.
    """
    try:
        return FORMATS[name.lower()]
    except KeyError:
        known = ", ".join(FORMATS)
        raise ValueError(f"there is no number format {name!r}: choose one of {known}") from None
