"""Two runs beside each other, and the range of each module's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.reports.figures.style import (
    empty,
    exponent_axis,
    figure,
    layer_axis,
    range_mark,
    row_height,
)
from mpdiag.reports.palette import BLUE, GREY, ORANGE, PURPLE, VERMILION
from mpdiag.reports.words import in_figure

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.numerics.formats import FloatFormat


def side_by_side(
    frame: pd.DataFrame, a: str, b: str, measure: str = "absmax", most: int = 40
) -> go.Figure:
    """Layers of two runs (``comparison_frame``): a dot for each run, a line between them.

    Args:
        frame: The table, of one kind.
        a: What to call the first run.
        b: What to call the second.
        measure: ``absmax`` (log2), ``underflow`` or ``overflow`` (shares).
        most: Layers shown, the first of the table.
    """
    if frame.empty:
        return empty("the two runs have no layer of this kind in common")
    part = frame.head(most)
    names = [str(name) for name in part["name"]]
    left, right = (_values(part[f"{measure}_{side}"], measure) for side in "ab")
    fig = figure(row_height(len(names)))
    places = np.arange(len(names))
    gaps = np.full(len(names), np.nan)
    fig.add_scatter(
        x=np.stack([left, right, gaps], 1).ravel(),
        y=np.stack([places, places, gaps], 1).ravel(),
        mode="lines",
        line={"color": GREY, "width": 2},
        showlegend=False,
        hoverinfo="skip",
    )
    value = "2^%{x:.1f}" if measure == "absmax" else "%{x:.2%}"
    for values, name, colour, symbol in ((left, a, BLUE, "circle"), (right, b, ORANGE, "diamond")):
        label = in_figure(name)
        fig.add_scatter(
            x=values,
            y=places,
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=[in_figure(n) for n in names],
            hovertemplate="%{customdata}: " + value + "<extra>" + label + "</extra>",
        )
    layer_axis(fig, names)
    if measure == "absmax":
        known = np.concatenate([left, right])
        known = known[np.isfinite(known)]
        if known.size:
            exponent_axis(
                fig, int(np.floor(known.min())) - 1, int(np.ceil(known.max())) + 1, "largest |x|"
            )
    else:
        fig.update_xaxes(tickformat=".1%", rangemode="tozero", title=f"{measure} in FP16")
    return fig


def ranges(frame: pd.DataFrame, fmt: FloatFormat, most: int = 40) -> go.Figure:
    """From the smallest to the largest |x| of each module's output, against a format's ends.

    Args:
        frame: ``layers_frame`` of activations.
        fmt: The format.
        most: Modules shown, those with the largest values.
    """
    known = frame[frame["absmax"] > 0] if len(frame) else frame
    if known.empty:
        return empty("no activation was recorded")
    top = known.sort_values("absmax", ascending=False, kind="stable").head(most)
    names = [str(name) for name in top["name"]]
    low, high = (np.log2(top[c].to_numpy(float)) for c in ("absmin", "absmax"))
    over = top["overflow"].to_numpy() > 0
    fig = figure(row_height(len(names)))
    labels = np.array([in_figure(name) for name in names])
    places = np.arange(len(names))
    for mask, name, colour in ((~over, f"fits {fmt.label}", BLUE), (over, "overflows", VERMILION)):
        if not mask.any():
            continue
        fig.add_bar(
            base=low[mask],
            x=(high - low)[mask],
            y=places[mask],
            orientation="h",
            width=0.5,
            name=name,
            marker={"color": colour},
            customdata=np.stack([labels[mask], low[mask], high[mask]], 1),
            hovertemplate="%{customdata[0]}: 2^%{customdata[1]:.1f} to 2^%{customdata[2]:.1f}"
            "<extra></extra>",
        )
    limit = float(np.log2(fmt.overflow_threshold))
    for place, words, colour, side in (
        (fmt.zero_exponent, "0 ←", VERMILION, "right"),
        (limit, "→ ∞", PURPLE, "left"),
    ):
        range_mark(fig, place, words, colour, side)
    layer_axis(fig, names)
    ends = [limit, float(fmt.zero_exponent), float(low.min()), float(high.max())]
    exponent_axis(fig, int(np.floor(min(ends))) - 1, int(np.ceil(max(ends))) + 2, "|x| of outputs")
    return fig


def _values(column: pd.Series[float], measure: str) -> np.ndarray:
    values = column.to_numpy(float)
    return np.log2(np.where(values > 0, values, np.nan)) if measure == "absmax" else values
