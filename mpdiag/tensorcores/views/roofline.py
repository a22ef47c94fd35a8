"""Matrix operations under their device's roofs: what they achieved, and what it could do.

A product does some FLOP for each byte it must move. Left of a roof's ridge the memory's bandwidth
limits it, right of it the units that multiply (Williams, Waterman and Patterson, *Roofline*, CACM
2009). FLOP are those asked for and bytes the least that must move, so that a convolution by
Winograd's or an FFT's shortcut may stand above a roof, and one that reads twice below.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import GREEN, GREY, VERDICT_COLORS, VERMILION
from mpdiag.display.wording import beginning, counted, in_figure, percent
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import GRID, Drawing, empty, figure
from mpdiag.tensorcores.views.tensor_core_use import table_receipt

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


_SYMBOLS = {"tensor_core": "circle", "cuda_core": "square", "unknown": "diamond"}
_UNITS = {"tensor": "tensor_core", "cuda": "cuda_core"}
"""The verdict of what ran on each unit."""
_NONE = "the profile has no matrix operation with known FLOPs and time"
_CLOSE = 1.3
"""Roofs nearer to each other than this are labelled one above and one below its line."""


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
    shown = roofs.shown(frame) if roofs else ()
    bounds = _bounds(frame, roofs, shown)
    if roofs:
        _draw_roofs(fig, roofs, shown, bounds, words)
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
    (left, right), (low, high) = bounds
    fig.update_xaxes(**_decades(left, right, "FLOP for each byte that must move"))
    fig.update_yaxes(**_decades(low, high, "achieved, TFLOP/s"))
    return fig.figure()


def _bounds(
    frame: pd.DataFrame, roofs: Roofs | None, shown: tuple[Roof, ...]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What both axes show: every operation, and every roof with its ridge."""
    x, y = list(frame["intensity"]), list(frame["rate"])
    if roofs:
        x += [roof.rate / roofs.bandwidth for roof in shown]
        y += [roof.rate for roof in shown]
    return (min(x) / 2, max(x) * 4), (min(y) / 2, max(y) * 2.5)


def _draw_roofs(
    fig: Drawing,
    roofs: Roofs,
    shown: tuple[Roof, ...],
    bounds: tuple[tuple[float, float], tuple[float, float]],
    words: Mapping[str, str],
) -> None:
    (left, right), (low, _) = bounds
    top = shown[0].rate if shown else low
    begin = max(left, low / roofs.bandwidth)
    ridge = top / roofs.bandwidth
    _line(fig, [begin, ridge], [begin * roofs.bandwidth, top], GREY, "solid")
    above: float | None = None
    for roof in shown:
        colour, dash = (GREEN, "solid") if roof.unit == "tensor" else (VERMILION, "dash")
        _line(fig, [roof.rate / roofs.bandwidth, right], [roof.rate] * 2, colour, dash)
        below = above is not None and above / roof.rate < _CLOSE
        dtypes = ", ".join(name.upper() for name in roof.dtypes)
        fig.add_annotation(
            x=math.log10(right),
            y=math.log10(roof.rate),
            text=f"{words[_UNITS[roof.unit]]}, {in_figure(dtypes)}: {roof.rate:g} TFLOP/s",
            xanchor="right",
            yanchor="top" if below else "bottom",
            showarrow=False,
            font={"color": colour, "size": 12},
        )
        above = roof.rate
    middle = math.sqrt(begin * ridge)
    fig.add_annotation(
        x=math.log10(middle),
        y=math.log10(middle * roofs.bandwidth),
        text=f"memory: {1000 * roofs.bandwidth:g} GB/s",
        xanchor="right",
        yanchor="bottom",
        xshift=-6,
        showarrow=False,
        font={"color": GREY, "size": 12},
    )


def _line(fig: Drawing, x: list[float], y: list[float], colour: str, dash: str) -> None:
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": colour, "width": 2, "dash": dash},
        showlegend=False,
        hoverinfo="skip",
    )


def _decades(low: float, high: float, title: str) -> dict[str, Any]:
    """A logarithmic axis, labelled at the powers of ten."""
    places = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return {
        "type": "log",
        "title": title,
        "range": [math.log10(low), math.log10(high)],
        "tickmode": "array",
        "tickvals": [10.0**e for e in places],
        "ticktext": [f"{10.0**e:g}" for e in places],
        "gridcolor": GRID,
    }


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
    missing = left_out(profile, frame)
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
