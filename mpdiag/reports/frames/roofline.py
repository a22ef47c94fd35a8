"""Matrix operations under their device's roofs: what they achieved, beside what it could do.

A product does some FLOP for each byte it must move. Left of a roof's ridge the memory's bandwidth
limits it, right of it the units that multiply (Williams, Waterman and Patterson, *Roofline*, CACM
2009). FLOP are those asked for and bytes the least that must move, so that a convolution by
Winograd's or an FFT's shortcut may stand above a roof, and one that reads twice below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Unit = Literal["tensor", "cuda"]
_WORDS = ["op", "module", "phase", "kernel", "dtype", "verdict"]
_NUMBERS = ["m", "n", "k", "batch", "flops", "bytes", "calls", "time_us"]
COLUMNS = [
    *("op", "module", "phase", "kernel", "shape", "dtype", "verdict"),
    *("intensity", "rate", "roof", "reached", "bound", "calls", "time_us"),
]


@dataclass(frozen=True)
class Roof:
    """The most one kind of unit can do.

    Attributes:
        unit: Tensor Cores or CUDA cores.
        dtypes: Of the operands, those with this rate.
        rate: TFLOP/s.
    """

    unit: Unit
    dtypes: tuple[str, ...]
    rate: float


@dataclass(frozen=True)
class Roofs:
    """What a device can do, by a profile's own account.

    Attributes:
        bandwidth: TB/s of device memory.
        tensor, cuda: TFLOP/s by dtype.
        source: Where the figures stand.
    """

    bandwidth: float
    tensor: Mapping[str, float]
    cuda: Mapping[str, float]
    source: str

    def rate(self, verdict: str, dtype: str) -> float:
        """TFLOP/s of the units that a verdict names; NaN where it names none, or that is not known."""
        rates = {"tensor_core": self.tensor, "cuda_core": self.cuda}.get(verdict, {})
        return rates.get(_family(dtype), math.nan)

    def shown(self, operations: pd.DataFrame) -> tuple[Roof, ...]:
        """The roofs to draw, highest first: FP16 on Tensor Cores, FP32 on CUDA cores, and what ran.

        Dtypes of one unit and rate share a roof.
        """
        used = list(zip(operations["verdict"], operations["dtype"], strict=True))
        wanted: list[tuple[Unit, str]] = [("tensor", "fp16"), ("cuda", "fp32")]
        for verdict, dtype in used:
            family = _family(str(dtype))
            wanted.append(("tensor" if verdict == "tensor_core" else "cuda", family))
            if family == "fp32":
                wanted.append(("tensor", "tf32"))  # what it could have run as
        merged: dict[tuple[Unit, float], list[str]] = {}
        for unit, dtype in dict.fromkeys(wanted):
            rates = self.tensor if unit == "tensor" else self.cuda
            if dtype in rates:
                merged.setdefault((unit, rates[dtype]), []).append(dtype)
        roofs = [Roof(unit, tuple(sorted(names)), rate) for (unit, rate), names in merged.items()]
        return tuple(sorted(roofs, key=lambda roof: -roof.rate))


def roofs_of(profile: Mapping[str, Any]) -> Roofs | None:
    """The roofs of a profile's device; None where it does not tell them."""
    device = profile.get("device")
    peaks = device.get("peaks") if isinstance(device, dict) else None
    if not isinstance(peaks, dict):
        return None
    bandwidth = _positive({"": peaks.get("bandwidth_gbps")}).get("", 0.0) / 1000
    tensor, cuda = (_positive(peaks.get(name)) for name in ("tensor_tflops", "cuda_tflops"))
    if not bandwidth or not (tensor or cuda):
        return None
    return Roofs(bandwidth, tensor, cuda, str(peaks.get("source") or ""))


def roofline_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """Every matrix operation whose work and time are known, those of the most time first.

    Returns:
        ``op``, ``module``, ``phase``, ``kernel`` (of the most time), ``shape`` (M × N × K),
        ``dtype``, ``verdict``; ``intensity`` in FLOP per byte; ``rate`` achieved, in TFLOP/s, of
        all its kernels' time; ``roof``: the most the units it ran on can do at that intensity, and
        ``reached``: the share of it, both NaN where the device's rates are not known; ``bound``:
        what the roof is there, ``memory`` or ``compute``; ``calls``, ``time_us``.
    """
    rows = [row for row in profile.get("operations", []) if isinstance(row, dict)]
    frame = pd.DataFrame([{name: row.get(name) for name in _WORDS + _NUMBERS} for row in rows])
    if frame.empty:
        return pd.DataFrame(columns=COLUMNS)
    for name in _NUMBERS:
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype(float)
    for name in _WORDS:
        frame[name] = [value if isinstance(value, str) else "" for value in frame[name]]
    work = frame["flops"] * frame["calls"]
    known = np.isfinite(work) & np.isfinite(frame["time_us"]) & np.isfinite(frame["bytes"])
    known &= (work > 0) & (frame["time_us"] > 0) & (frame["bytes"] > 0)
    frame = frame[known].sort_values("time_us", ascending=False, kind="stable", ignore_index=True)
    frame["shape"] = [_shape(row) for row in frame.to_dict("records")]
    frame["intensity"] = frame["flops"] / frame["bytes"]
    frame["rate"] = frame["flops"] * frame["calls"] / frame["time_us"] / 1e6
    roofs = roofs_of(profile)
    unit = [
        roofs.rate(verdict, dtype) if roofs else math.nan
        for verdict, dtype in zip(frame["verdict"], frame["dtype"], strict=True)
    ]
    memory = frame["intensity"] * (roofs.bandwidth if roofs else math.nan)
    frame["roof"] = np.where(np.isfinite(unit), np.minimum(unit, memory), math.nan)
    frame["reached"] = frame["rate"] / frame["roof"]
    frame["bound"] = np.where(
        np.isfinite(frame["roof"]), np.where(memory < unit, "memory", "compute"), ""
    )
    result: pd.DataFrame = frame[COLUMNS]
    return result


def left_out(profile: Mapping[str, Any], frame: pd.DataFrame) -> int:
    """How many matrix operations a ``roofline_frame`` lacks: their work is not known."""
    rows: Collection[Any] = profile.get("operations", [])
    matrix = sum(isinstance(row, dict) and row.get("m") is not None for row in rows)
    return max(0, matrix - len(frame))


def _family(dtype: str) -> str:
    return "fp8" if dtype.startswith("fp8") else dtype


def _positive(rates: Any) -> dict[str, float]:
    if not isinstance(rates, dict):
        return {}
    return {
        str(name): float(rate)
        for name, rate in rates.items()
        if isinstance(rate, (int, float)) and 0 < rate < math.inf
    }


def _shape(row: Mapping[str, Any]) -> str:
    sizes = [row[name] for name in "mnk"]
    if not all(math.isfinite(size) for size in sizes):
        return ""
    batch = row["batch"] if math.isfinite(row["batch"]) else 1
    words = " × ".join(f"{size:.0f}" for size in sizes)
    return f"{batch:.0f} of {words}" if batch > 1 else words
