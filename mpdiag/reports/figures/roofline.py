"""Matrix operations under the roofs of their device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.reports.figures.style import GRID, empty, figure
from mpdiag.reports.palette import GREEN, GREY, VERDICTS, VERMILION
from mpdiag.reports.words import beginning, in_figure, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.reports.frames.roofline import Roof, Roofs

_SYMBOLS = {"tensor_core": "circle", "cuda_core": "square", "unknown": "diamond"}
_UNITS = {"tensor": "Tensor Cores", "cuda": "CUDA cores"}
_NONE = "no matrix operation in the profile tells its work and its time"
_CLOSE = 1.3
"""Roofs nearer to each other than this are labelled one above and one below its line."""


def roofline(frame: pd.DataFrame, roofs: Roofs | None, words: Mapping[str, str]) -> go.Figure:
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
        _draw_roofs(fig, roofs, shown, bounds)
    whole = frame["time_us"].sum()
    for verdict, colour in VERDICTS.items():
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
            customdata=[_words(row, row["time_us"] / whole) for row in part.to_dict("records")],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    (left, right), (low, high) = bounds
    _decades(fig.layout.xaxis, left, right, "FLOP for each byte that must move")
    _decades(fig.layout.yaxis, low, high, "achieved, TFLOP/s")
    return fig


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
    fig: go.Figure,
    roofs: Roofs,
    shown: tuple[Roof, ...],
    bounds: tuple[tuple[float, float], tuple[float, float]],
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
            text=f"{_UNITS[roof.unit]}, {in_figure(dtypes)}: {roof.rate:g} TFLOP/s",
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


def _line(fig: go.Figure, x: list[float], y: list[float], colour: str, dash: str) -> None:
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": colour, "width": 2, "dash": dash},
        showlegend=False,
        hoverinfo="skip",
    )


def _decades(axis: object, low: float, high: float, title: str) -> None:
    places = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    axis.update(  # type: ignore[attr-defined]
        type="log",
        title=title,
        range=[math.log10(low), math.log10(high)],
        tickmode="array",
        tickvals=[10.0**e for e in places],
        ticktext=[f"{10.0**e:g}" for e in places],
        gridcolor=GRID,
    )


def _words(row: Mapping[Any, Any], share: float) -> str:
    """What stands under the pointer."""
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
