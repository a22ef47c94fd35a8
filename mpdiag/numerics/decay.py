"""What a factor just below 1 does to values that are stored in a narrow format, by trying all of them.

An optimizer lowers a moving average by ``v ← βv``, and a weight by ``w ← (1 − lr·decay)w``. Where the
product lies within half a unit in the last place of the value, rounding gives the value back: it never
falls. Whether it does depends on the mantissa alone, but for subnormals, so a format is tried whole.

The product is that of torch's kernels: an FP32 multiplication by the factor as FP32, rounded to nearest
even (``aten/src/ATen/native/cpu/BinaryOpsKernel.cpp``, ``opmath_t``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NARROW = ("bfloat16", "float16")
"""Formats that can be tried whole."""


@dataclass(frozen=True)
class Decay:
    """What a factor does to the positive normal values of a format.

    Attributes:
        stuck: Values that rounding gives back unchanged.
        values: Positive normal values of the format.
    """

    stuck: int
    values: int

    @property
    def share(self) -> float:
        """Share of the values that never fall."""
        return self.stuck / self.values


@lru_cache(maxsize=256)
def decay(dtype: str, factor: float) -> Decay:
    """Multiply every positive normal value of a format by a factor, and count those that stay.

    Args:
        dtype: ``bfloat16`` or ``float16``.
        factor: From 0 to 1.

    Raises:
        KeyError: If the format is another.
    """
    return _stuck(dtype, lambda values: values * np.float32(factor))


@lru_cache(maxsize=256)
def lerped(dtype: str, weight: float) -> Decay:
    """Move every positive normal value towards 0 as ``torch.lerp`` does, and count those that stay.

    Args:
        dtype: ``bfloat16`` or ``float16``.
        weight: From 0 to 0.5: what is taken of each.

    Raises:
        KeyError: If the format is another.
    """
    return _stuck(dtype, lambda values: values - np.float32(weight) * values)


def _stuck(dtype: str, lower: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Decay:
    values = _normals(dtype)
    return Decay(int((rounded(lower(values), dtype) == values).sum()), values.size)


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """FP32 values rounded to nearest even in a narrow format; finite ones."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _normals(dtype: str) -> NDArray[np.float32]:
    first, last = {"bfloat16": (0x0080, 0x7F80), "float16": (0x0400, 0x7C00)}[dtype]
    patterns = np.arange(first, last, dtype=np.uint32)
    if dtype == "float16":
        return patterns.astype(np.uint16).view(np.float16).astype(np.float32)
    return (patterns << 16).view(np.float32)
