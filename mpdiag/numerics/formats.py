"""The floating-point formats of mixed-precision training: limits and rounding.

Everything here follows from four numbers per format (exponent range, stored mantissa bits, largest
finite value, and whether infinity exists), so no other module repeats a threshold.

Sources: IEEE 754-2019 (FP32, FP16); *OCP 8-bit Floating Point Specification (OFP8)* rev. 1.0 for
E4M3 and E5M2; NVIDIA, *Training with Mixed Precision User Guide*, section 2.1 (FP16's range).
All formats round to nearest, ties to even. TF32 here is FP32 rounded the same way to 10 mantissa
bits (hardware may round ties away from zero, which moves no threshold by more than the tie itself).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class FloatFormat:
    """One binary floating-point format.

    Attributes:
        name: The name used on the command line and in files, such as ``"fp16"``.
        label: The name printed for people, such as ``"FP16"``.
        bits: Bits of storage.
        mantissa_bits: Stored mantissa bits (the leading 1 is not stored).
        min_exponent: Exponent of the smallest normal value, 2^min_exponent.
        max: Largest finite value.
        has_infinity: False where the format has NaN but no infinity (E4M3).
        torch_name: The ``torch.dtype`` that stores it, or None where torch has none (TF32).
    """

    name: str
    label: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    has_infinity: bool
    torch_name: str | None

    @property
    def max_exponent(self) -> int:
        """Exponent e of the binade [2^e, 2^(e+1)) that holds the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest positive value, 2^min_subnormal_exponent."""
        return self.min_exponent - self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return math.ldexp(1.0, self.min_subnormal_exponent)

    @property
    def zero_exponent(self) -> int:
        """z such that a non-zero x becomes 0 exactly when |x| ≤ 2^z.

        Half the smallest subnormal is a tie, and the even neighbour of that tie is 0.
        """
        return self.min_subnormal_exponent - 1

    @property
    def overflow_threshold(self) -> float:
        """Half-way between ``max`` and the value that would follow it: where overflow begins."""
        ulp = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        return self.max + ulp / 2

    @property
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

    def significant_bits(self, exponent: int) -> int:
        """Bits of significand kept by a value in [2^exponent, 2^(exponent+1)); 0 if none.

        For FP16 an exponent k in [-24, -15] keeps 25 + k bits (the user guide, section 2.1, prints
        ``25 - k`` with k taken as its magnitude).
        """
        if exponent > self.max_exponent:
            return 0
        kept = self.mantissa_bits + 1 - max(0, self.min_exponent - exponent)
        return max(0, kept)

    def round(self, values: ArrayLike) -> NDArray[np.float64]:
        """Round to this format, ties to even; what is out of range becomes ±inf (NaN for E4M3).

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
        beyond = math.inf if self.has_infinity else math.nan
        rounded = np.where(np.abs(rounded) > self.max, np.copysign(beyond, x), rounded)
        infinite = np.isinf(x)
        return np.where(infinite, np.copysign(beyond, x), np.where(finite, rounded, np.nan))


FP32 = FloatFormat("fp32", "FP32", 32, 23, -126, (2 - 2.0**-23) * 2.0**127, True, "float32")
TF32 = FloatFormat("tf32", "TF32", 19, 10, -126, (2 - 2.0**-10) * 2.0**127, True, None)
FP16 = FloatFormat("fp16", "FP16", 16, 10, -14, 65504.0, True, "float16")
BF16 = FloatFormat("bf16", "BF16", 16, 7, -126, (2 - 2.0**-7) * 2.0**127, True, "bfloat16")
FP8_E4M3 = FloatFormat("fp8_e4m3", "FP8 E4M3", 8, 3, -6, 448.0, False, "float8_e4m3fn")
FP8_E5M2 = FloatFormat("fp8_e5m2", "FP8 E5M2", 8, 2, -14, 57344.0, True, "float8_e5m2")

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FP32, TF32, FP16, BF16, FP8_E4M3, FP8_E5M2)}


def format_named(name: str) -> FloatFormat:
    """Look a format up by name, in any case.

    Raises:
        ValueError: If there is no such format; the message lists those there are.
    """
    try:
        return FORMATS[name.lower()]
    except KeyError:
        known = ", ".join(FORMATS)
        message = f"there is no number format {name!r}: choose one of {known}"
        raise ValueError(message) from None
