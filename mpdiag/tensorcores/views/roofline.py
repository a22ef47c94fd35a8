"""Matrix operations under their device's roofs: what they achieved, and what it could do.

A product does some FLOP for each byte it must move. Left of a roof's ridge the memory's bandwidth
limits it, right of it the units that multiply (Williams, Waterman and Patterson, *Roofline*, CACM
2009). FLOP are those asked for and bytes the least that must move, so that a convolution by
Winograd's or an FFT's shortcut may stand above a roof, and one that reads twice below.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import GREY, VERDICT_COLORS
from mpdiag.display.wording import beginning, counted, in_figure, percent
from mpdiag.hardware.peaks import family
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure
from mpdiag.tensorcores.views.tensor_core_use import table_receipt

_WORDS = ["op", "module", "phase", "kernel", "dtype", "verdict"]
_NUMBERS = ["m", "n", "k", "batch", "flops", "bytes", "calls", "time_us"]
COLUMNS = [
    *("op", "module", "phase", "kernel", "shape", "dtype", "verdict"),
    *("intensity", "rate", "roof", "reached", "bound", "calls", "time_us"),
]


@dataclass(frozen=True)
class Roofs:
    """What a device can do, by a profile's own account.

    Attributes:
        bandwidth: TB/s of device memory.
        rates: TFLOP/s by the verdict of what runs on a unit, and dtype.
        source: Where the figures stand.
    """

    bandwidth: float
    rates: Mapping[tuple[str, str], float]
    source: str

    def rate(self, verdict: str, dtype: str) -> float:
        """TFLOP/s of the units that a verdict names; NaN where it names none, or that is not known."""
        return self.rates.get((verdict, family(dtype)), math.nan)

    def shown(self, operations: pd.DataFrame) -> dict[tuple[str, float], str]:
        """The dtypes of each unit and rate to draw, highest first.

        FP16 on Tensor Cores, FP32 on CUDA cores, what ran, and what FP32 could have run as.
        """
        wanted = [("tensor_core", "fp16"), ("cuda_core", "fp32")]
        for verdict, dtype in zip(operations["verdict"], operations["dtype"], strict=True):
            wanted.append((verdict, family(str(dtype))))
            wanted += [("tensor_core", "tf32")] if dtype == "fp32" else []
        found: dict[tuple[str, float], str] = {}
        for verdict, dtype in sorted({key for key in wanted if key in self.rates}):
            key = verdict, self.rates[verdict, dtype]
            found[key] = ", ".join(filter(None, (found.get(key), dtype.upper())))
        return dict(sorted(found.items(), key=lambda entry: -entry[0][1]))


def roofs_of(profile: Mapping[str, Any]) -> Roofs | None:
    """The roofs of a profile's device; None where it does not tell them."""
    device = profile.get("device")
    peaks = device.get("peaks") if isinstance(device, dict) else None
    if not isinstance(peaks, dict):
        return None
    bandwidth = _positive({"": peaks.get("bandwidth_gbps")}).get("", 0.0) / 1000
    rates = {
        (verdict, dtype): rate
        for verdict, key in (("tensor_core", "tensor_tflops"), ("cuda_core", "cuda_tflops"))
        for dtype, rate in _positive(peaks.get(key)).items()
    }
    if not bandwidth or not rates:
        return None
    return Roofs(bandwidth, rates, str(peaks.get("source") or ""))


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


_SYMBOLS = {"tensor_core": "circle", "cuda_core": "square", "unknown": "diamond"}
_NONE = "the profile has no matrix operation with known FLOPs and time"


def roofline_figure(
    frame: pd.DataFrame, roofs: Roofs | None, words: Mapping[str, str]
) -> go.Figure:
    """Achieved rate over arithmetic intensity, both logarithmic (``roofline_frame``).

    Args:
        frame: The operations.
        roofs: The device's; None draws the operations alone.
        words: What verdicts are called on it.
    """
    if frame.empty:
        return empty(_NONE)
    fig = figure(460)
    if roofs is not None:
        shown = roofs.shown(frame)
        low = frame["rate"].min() / 2 / roofs.bandwidth
        top = max((rate for _, rate in shown), default=frame["rate"].max())
        right = 4 * max(frame["intensity"].max(), top / roofs.bandwidth)
        ends = [low, top / roofs.bandwidth]
        slope = f"memory: {1000 * roofs.bandwidth:g} GB/s"
        unseen: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip", "mode": "lines+text"}
        heights = [end * roofs.bandwidth for end in ends]
        line = {"color": GREY, "width": 2}
        fig.add_scatter(
            x=ends, y=heights, text=[slope, ""], textposition="bottom right", line=line, **unseen
        )
        for (verdict, rate), dtypes in shown.items():
            fig.add_scatter(
                x=[rate / roofs.bandwidth, right],
                y=[rate, rate],
                text=["", f"{words[verdict]}, {in_figure(dtypes)}: {rate:g} TFLOP/s"],
                textposition="top left" if verdict == "tensor_core" else "bottom left",
                line={"color": VERDICT_COLORS[verdict], "width": 2},
                **unseen,
            )
    whole = frame["time_us"].sum()
    for verdict, colour in VERDICT_COLORS.items():
        part = frame[frame["verdict"] == verdict]
        if part.empty:
            continue
        name = words[verdict]
        fig.add_scatter(
            x=part["intensity"],
            y=part["rate"],
            name=f"{name} ({len(part)})",
            showlegend=True,
            mode="markers",
            marker={
                "color": colour,
                "symbol": _SYMBOLS.get(verdict, "x"),
                "size": 9 + 26 * np.sqrt(part["time_us"] / whole),
                "opacity": 0.82,
                "line": {"width": 1, "color": "rgba(255, 255, 255, 0.7)"},
            },
            customdata=[_hover(row, row["time_us"] / whole) for row in part.to_dict("records")],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    decades: dict[str, Any] = {"type": "log", "dtick": 1, "exponentformat": "none"}
    fig.update_xaxes(title="FLOP for each byte that must move", **decades)
    return fig.update_yaxes(title="achieved, TFLOP/s", **decades)


def _hover(row: Mapping[Any, Any], share: float) -> str:
    """The text under the pointer."""
    reached = float(str(row["reached"]))
    lines = [
        f"<b>{in_figure(str(row['module']))}</b>",
        in_figure(f"{row['op']} {row['phase']}"),
        in_figure(f"{row['shape']} {row['dtype']}"),
        in_figure(beginning(str(row["kernel"]), 90)) if row["kernel"] else "",
        f"{row['rate']:.4g} TFLOP/s at {row['intensity']:.4g} FLOP per byte",
        f"{percent(reached)} of its roof ({row['bound']})" if math.isfinite(reached) else "",
        f"{row['calls']:.0f} calls, {row['time_us']:,.0f} µs, {percent(share)} of the time shown",
    ]
    return "<br>".join(line for line in lines if line.strip())


def roofline(run: str, profile: Mapping[str, Any], names: Mapping[str, str]) -> Picture:
    """Matrix operations under the roofs of the device."""
    frame = roofline_frame(profile)
    roofs = roofs_of(profile)
    matrix = sum(
        isinstance(row, dict) and row.get("m") is not None for row in profile.get("operations", [])
    )
    missing = max(0, matrix - len(frame))
    absent = ""
    if missing:
        absent = f" {counted(missing, 'operation is', 'operations are')} missing: sizes not known."
    how = "FLOP are those asked for: a shortcut (Winograd, FFT) may rise above"
    if roofs:
        title = "Roofline: what each product achieved, and what the device could do"
        caption = (
            "Memory limits the operations under the slope, arithmetic those under a flat roof. "
            f"Larger marks took more time. {how} its roof. Roofs: {roofs.source}."
        )
    else:
        title = "What each product achieved"
        caption = (
            f"Larger marks took more time. {how} what the device can do. No roof is drawn: no "
            "published rates are known for this device."
        )
    return Picture(
        "roofline",
        title,
        caption + absent,
        roofline_figure(frame, roofs, names),
        frame,
        table_receipt(
            run,
            "operations",
            [*("op", "module", "verdict", "intensity", "rate", "calls", "time_us")],
            where='(frame["flops"] > 0) & (frame["bytes"] > 0) & (frame["time_us"] > 0)',
            intensity='frame["flops"] / frame["bytes"]  # FLOP per byte',
            rate='frame["flops"] * frame["calls"] / frame["time_us"] / 1e6  # TFLOP/s',
        ),
    )
