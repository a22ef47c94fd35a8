"""The rate that an operation achieved: its FLOP, by its work model, in the time of its kernels.

A rate above the published peak cannot be true as it stands: either the clock ran above the one that
the peak is published for, or the kernel did less arithmetic than the operation calls for (Winograd,
FFT). Then no share of the peak is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpdiag.hardware.devices import DeviceFacts
    from mpdiag.hardware.peaks import Peaks
    from mpdiag.tensorcores.work.traced_operation import OperationTime


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

    def to_json(self) -> dict[str, Any]:
        """Keys of an entry of ``operations``."""
        shares = self.shares
        return {
            "tflops": self.most,
            "tflops_least": self.least,
            "peak_tflops": self.peak,
            "peak_share": shares[1] if shares else None,
            "peak_share_least": shares[0] if shares else None,
            "above_peak": self.above_peak,
        }


NO_RATE: dict[str, Any] = {
    "tflops": None,
    "tflops_least": None,
    "peak_tflops": None,
    "peak_share": None,
    "peak_share_least": None,
    "above_peak": False,
}


def achieved_rate(
    o: OperationTime, device: DeviceFacts | None, *, used: bool | None
) -> AchievedRate | None:
    """The rate of an operation, all its calls and kernels together.

    Args:
        o: The operation.
        device: The GPU; None where it is not known.
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
    peaks = device.peaks if device is not None else None
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
