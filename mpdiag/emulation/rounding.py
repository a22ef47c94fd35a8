"""Rounding of FP32 tensors to a narrower format, on any device."""

import torch
from torch import Tensor

from mpdiag.numerics.formats import FP32, HALVES, FloatFormat

DTYPES: dict[str, torch.dtype] = {f.name: getattr(torch, str(f.torch_name)) for f in HALVES}
"""The formats of 16 bits by name."""


def round_to(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Round to the nearest value of a format, ties to even; values out of range become infinite.

    Formats without infinity (E4M3) give NaN there, as ``FloatFormat.round`` does; torch's own FP8
    casts saturate in some versions.

    Args:
        values: Floating point, any shape.
        fmt: The format; FP32 returns the values unchanged.

    Returns:
        A tensor of the same dtype.
    """
    if fmt == FP32:
        return values
    cast = DTYPES.get(fmt.name)
    if cast is not None:
        return values.to(cast).to(values.dtype)
    whole = values if values.dtype == torch.float64 else values.float()
    magnitude = whole.abs()
    _, exponent = torch.frexp(magnitude)  # |x| in [2^(e-1), 2^e)
    least = torch.full_like(exponent, fmt.min_exponent)
    quantum = torch.maximum(exponent - 1, least) - fmt.mantissa_bits
    # Multiplying by powers of two is exact; torch.round takes ties to even.
    steps = torch.round(times_power_of_two(magnitude, -quantum))
    rounded = times_power_of_two(steps, quantum)
    rounded = torch.where(rounded > fmt.max, torch.full_like(rounded, fmt.beyond), rounded)
    rounded = torch.copysign(rounded, whole)
    infinite = torch.full_like(whole, fmt.beyond).copysign(whole)
    found = torch.where(whole.isfinite(), rounded, torch.where(whole.isnan(), whole, infinite))
    return found.to(values.dtype)


def times_power_of_two(values: Tensor, exponents: Tensor) -> Tensor:
    """Values times 2 to the power of exponents, in two steps: TF32's subnormals need 2^136."""
    first = exponents // 2
    return values * _power_of_two(first) * _power_of_two(exponents - first)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 to the power of int32 exponents, as float32; those of no normal number are clamped.

    Made of bits: ``torch.ldexp`` and ``torch.pow`` call the device's power function, which on a GPU
    need not be exact.
    """
    return ((exponents.clamp(-126, 127) + 127) << 23).view(torch.float32)
