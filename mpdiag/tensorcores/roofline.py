"""The roofline model: whether an operation is limited by arithmetic or by memory.

The arithmetic intensity of an operation is its FLOP per byte that it must move. The ridge of a device
is the FLOP it can do while moving one byte (139 for FP16 on a V100: 125 TFLOP/s over 900 GB/s). Below
the ridge memory is the limit, and faster arithmetic cannot help.

Source: NVIDIA, *Matrix Multiplication Background User's Guide*, section 2 (arithmetic intensity).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mpdiag.hardware.alignment import bytes_of, is_sized

if TYPE_CHECKING:
    from mpdiag.hardware.matrix_work import MatrixWork
    from mpdiag.hardware.peaks import Peaks
    from mpdiag.tensorcores.work.traced_operation import OperationTime

Bound = Literal["memory", "compute"]


@dataclass(frozen=True)
class RooflinePoint:
    """An operation in the roofline model.

    Attributes:
        intensity: FLOP per byte that must be moved.
        ridge: The device's ridge for this dtype.
        bound: What limits it.
        least_us: The least time one call can take, in microseconds.
    """

    intensity: float
    ridge: float
    bound: Bound
    least_us: float


def roofline_point(work: MatrixWork, peaks: Peaks, dtype: str) -> RooflinePoint | None:
    """The roofline point of a call on Tensor Cores in ``dtype``.

    Returns:
        None where the device has no Tensor Core instruction for the dtype, or the work's size is
        not known.
    """
    rate, moved = peaks.tensor_rate(dtype), bytes_in(work, dtype)
    if rate is None or not work.flops or not moved:
        return None
    bandwidth = peaks.bandwidth * 1e9
    least = max(work.flops / rate, moved / bandwidth)
    intensity, ridge = work.flops / moved, rate / bandwidth
    return RooflinePoint(
        intensity, ridge, "memory" if intensity < ridge else "compute", least * 1e6
    )


def bytes_in(work: MatrixWork, dtype: str) -> float:
    """The bytes moved if the operands had another dtype."""
    return work.bytes * bytes_of(dtype) / bytes_of(work.dtype or "fp32")


def moved_bytes(o: OperationTime) -> float | None:
    """The least number of bytes one call must move in its dtype; None where it is not known."""
    dtype = o.dtype if is_sized(o.dtype) else (o.work.dtype if o.work is not None else None)
    if o.work is None or not o.work.bytes or dtype is None:
        return None
    return bytes_in(o.work, dtype)


def memory_bound_anyway(work: MatrixWork, peaks: Peaks, dtype: str) -> bool:
    """Whether memory is the limit even at the ordinary cores' FP32 rate, so Tensor Cores cannot help."""
    moved = bytes_in(work, dtype)
    if not work.flops or not moved:
        return False
    return work.flops / moved < peaks.cuda_rate("fp32") / (peaks.bandwidth * 1e9)
