"""The roofline model: whether an operation is limited by arithmetic or by memory.

The arithmetic intensity of an operation is its FLOP per byte that it must move. The ridge of a device
is the FLOP it can do while moving one byte (139 for FP16 on a V100: 125 TFLOP/s over 900 GB/s). Below
the ridge memory is the limit, and faster arithmetic cannot help.

Source: NVIDIA, *Matrix Multiplication Background User's Guide*, section 2 (arithmetic intensity).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from mpdiag.hardware.alignment import bytes_of, is_sized
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.peaks import Peaks
from mpdiag.tensorcores.work.products import MatrixWork
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


@dataclass(frozen=True)
class AchievedRate:
    """A rate in TFLOP/s.

    Attributes:
        least, most: Equal, unless the work is only known within limits.
        peak: Published, of the units it ran on, in its dtype; None where that is not known.
    """

    least: float
    most: float
    peak: float | None

    @property
    def above_peak(self) -> bool:
        """Whether even the least is above the peak."""
        return self.peak is not None and self.least > self.peak

    @property
    def shares(self) -> tuple[float, float] | None:
        """The least and the most share of the peak, at most 1; None where there is none to tell."""
        if self.peak is None or self.above_peak:
            return None
        return self.least / self.peak, min(1.0, self.most / self.peak)


def rate_json(rate: AchievedRate | None) -> dict[str, Any]:
    """The keys of an entry of ``operations`` that say its rate."""
    shares = rate.shares if rate else None
    return {
        "tflops": rate.most if rate else None,
        "tflops_least": rate.least if rate else None,
        "peak_tflops": rate.peak if rate else None,
        "peak_share": shares[1] if shares else None,
        "peak_share_least": shares[0] if shares else None,
        "above_peak": rate.above_peak if rate else False,
    }


def achieved_rate(
    o: OperationTime, device: DeviceFacts, *, used: bool | None
) -> AchievedRate | None:
    """The rate of an operation, all its calls and kernels together.

    Args:
        o: The operation.
        device: The GPU.
        used: Whether it used Tensor Cores; None where that is not known, which is measured by the
            Tensor Cores' peak, the higher one.

    Returns:
        None where its work or its time is not known.
    """
    work = o.work
    if work is None or not work.flops or o.time_us <= 0:
        return None
    most = work.flops * o.calls / o.time_us / 1e6
    least = work.least_flops * o.calls / o.time_us / 1e6
    peaks = device.peaks
    dtype = o.dtype or work.dtype
    peak = _peak(peaks, dtype, used) if peaks is not None and dtype is not None else None
    return AchievedRate(least, most, peak)


def _peak(peaks: Peaks, dtype: str, used: bool | None) -> float | None:
    """TFLOP/s, as published; a peak that is only guessed at gives no share."""
    if used is False:
        return peaks.cuda.get("fp32" if dtype == "tf32" else dtype)
    wanted = "tf32" if dtype == "fp32" and "tf32" in peaks.tensor else dtype
    rate = peaks.tensor_rate(wanted)
    return None if rate is None else rate / 1e12


def speedup(share: float) -> float:
    """The whole's speed-up when a share of its time, 0 to 1, vanishes, which bounds every fix.

    At least 1; infinite where everything vanishes.
    """
    left = 1 - min(max(share, 0.0), 1.0)
    return math.inf if left <= 0 else 1 / left
