"""How small weight updates are beside their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.reports.figures.style import empty, exponent_axis, figure, layer_axis, row_height
from mpdiag.reports.frames.updates import BEGINS, CERTAIN
from mpdiag.reports.palette import BLUE, ORANGE, VERMILION
from mpdiag.reports.words import in_figure

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_NONE = "no weight update was recorded"


def ratios(frame: pd.DataFrame, *, log: bool = True) -> go.Figure:
    """The ratios |w|/|Δw| (``ratio_frame``), with the lines at 2048 and 4096."""
    if frame.empty:
        return empty(_NONE)
    fig = figure(360)
    parts = (
        (frame["exponent"] < BEGINS, "up to 2048: taken", BLUE),
        (frame["exponent"] == BEGINS, "2048 to 4096: some swallowed", ORANGE),
        (frame["exponent"] >= CERTAIN, "above 4096: all swallowed", VERMILION),
    )
    for mask, name, colour in parts:
        part = frame[mask]
        fig.add_bar(
            x=part["exponent"] + 0.5,
            y=part["count"],
            width=0.94,
            name=name,
            marker={"color": colour},
            customdata=part["exponent"],
            hovertemplate="2^%{customdata}: %{y:,} updates<extra></extra>",
        )
    fig.add_vline(BEGINS, line={"color": ORANGE, "width": 2, "dash": "dot"})
    fig.add_vline(CERTAIN, line={"color": VERMILION, "width": 2})
    low, high = int(frame["exponent"].min()), int(frame["exponent"].max()) + 1
    exponent_axis(fig, min(low, 4) - 1, max(high, CERTAIN + 2) + 1, "|w| / |Δw|, FP16 weights")
    fig.update_yaxes(type="log" if log else "linear", title="updates", exponentformat="power")
    return fig


def swallowed(frame: pd.DataFrame, most: int = 30) -> go.Figure:
    """Swallowed share of each parameter's updates (``update_frame``), the worst first."""
    if frame.empty:
        return empty(_NONE)
    worst = frame.head(most)
    names = [str(name) for name in worst["parameter"]]
    fig = figure(row_height(len(names)), barmode="overlay")
    labels = [in_figure(name) for name in names]
    places = list(range(len(names)))
    hover = "%{customdata}: %{x:.2%}<extra>%{fullData.name}</extra>"
    fig.add_bar(
        x=worst["fp16_share"],
        y=places,
        orientation="h",
        name="swallowed by FP16 weights",
        marker={"color": VERMILION, "opacity": 0.8},
        customdata=labels,
        hovertemplate=hover,
    )
    fig.add_scatter(
        x=worst["bf16_share"],
        y=places,
        mode="markers",
        name="by BF16 weights",
        marker={"color": BLUE, "symbol": "diamond", "size": 8},
        customdata=labels,
        hovertemplate=hover,
    )
    layer_axis(fig, names)
    fig.update_xaxes(tickformat=".0%", rangemode="tozero", title="share of changed elements")
    return fig


def swallowed_over_time(frame: pd.DataFrame) -> go.Figure:
    """Swallowed share at each recorded step (``swallowed_frame``)."""
    if frame.empty:
        return empty(_NONE)
    fig = figure(320)
    for column, name, colour, dash in (
        ("fp16_share", "FP16 weights", VERMILION, "solid"),
        ("bf16_share", "BF16 weights", BLUE, "dash"),
    ):
        fig.add_scatter(
            x=frame["step"],
            y=frame[column],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2.5, "dash": dash},
            marker={"size": 5},
            hovertemplate="step %{x}: %{y:.2%}<extra>" + name + "</extra>",
        )
    fig.update_xaxes(title="step")
    fig.update_yaxes(tickformat=".0%", rangemode="tozero", title="swallowed")
    return fig
