"""Figures of layers over the steps, and of one layer from step to step."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.display import svg
from mpdiag.display.colors import (
    BLUE,
    FATE_COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
)
from mpdiag.display.wording import in_figure, magnitude
from mpdiag.numerics.formats import FloatFormat
from mpdiag.reports import plotting
from mpdiag.reports.views.gradients import figure

WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"


def course_figure(
    frame: pd.DataFrame, updates: pd.DataFrame, fmt: FloatFormat, scale: str
) -> go.Figure:
    """What one layer loses, its largest value and its updates, at each recorded step.

    Args:
        frame: ``layer_course_frame``.
        updates: ``layer_updates_frame``; may be empty.
        fmt: The format.
        scale: The selected scale, as a phrase.
    """
    if frame.empty:
        return plotting.empty("not recorded in any step")
    rows = 3 if len(updates) else 2
    fig = plotting.figure(170 * rows + 50, hovermode="x")
    lines = [
        ("sum_share", f"sum lost in {fmt.label}, without a loss scale", VERMILION, "solid"),
        ("lost_share", f"values lost in {fmt.label}, without a loss scale", ORANGE, "dot"),
    ]
    if not np.allclose(frame["sum_share"], frame["sum_share_scaled"]):
        lines.append(("sum_share_scaled", f"sum lost in {fmt.label}, {scale}", GREEN, "dash"))
    for column, name, colour, dash in lines:
        _line(fig, frame["step"], frame[column], name, colour, "y", dash)
    with np.errstate(divide="ignore"):
        largest = np.log2(frame["absmax"].to_numpy(float))
    largest = np.where(np.isfinite(largest), largest, np.nan)
    _line(fig, frame["step"], largest, "largest |x|", BLUE, "y2")
    if len(updates):
        words = "|Δw| / |w| of its parameters"
        _line(fig, updates["step"], updates["update_ratio"], words, PURPLE, "y3")
    gap, height = 0.07, (1 - 0.07 * (rows - 1)) / rows
    base: dict[str, Any] = fig.layout["yaxis"]
    titles = ("lost", "largest |x|", "|Δw| / |w|")
    for i in range(rows):
        top = 1 - i * (height + gap)
        domain = [max(0.0, top - height), top]
        fig.layout["yaxis" if i == 0 else f"yaxis{i + 1}"] = base | {
            "domain": domain,
            "title": titles[i],
            "anchor": "x",
            "nticks": 5,
            **({"tickformat": ".2~%", "rangemode": "tozero"} if i == 0 else _POWERS),
        }
    fig.update_xaxes(title="step", anchor=f"y{rows}")
    return fig.figure()


_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}
"""An axis of log2, labelled as powers of two."""


def _line(
    fig: plotting.Drawing, x: Any, y: Any, name: str, colour: str, axis: str, dash: str = "solid"
) -> None:
    hover = "%{y:.2%}" if axis == "y" else "2^%{y:.1f}"
    dots = {"marker": {"size": 4}, "yaxis": axis}
    fig.dotted_line(x, y, name, colour, hover, width=2, dash=dash, **dots)


def movement_figure(frame: pd.DataFrame, most: int = 20) -> go.Figure:
    """The layers that moved most at a step (``movement_frame``), a bar each."""
    worst = frame.head(most)
    if worst.empty:
        return plotting.empty("nothing was recorded before this step to compare with")
    names = [str(name) for name in worst["layer"]]
    fig = plotting.figure(plotting.row_height(len(names)), hovermode="closest")
    shift = worst["shift"].to_numpy(float)
    said = [
        f"{in_figure(name)}<br>largest |x|: {magnitude(before)} → {magnitude(now)}"
        for name, before, now in zip(names, worst["absmax_before"], worst["absmax"], strict=True)
    ]
    for mask, words, colour in (
        (shift >= 0, "larger than before", VERMILION),
        (shift < 0, "smaller than before", BLUE),
    ):
        if mask.any():
            fig.add_bar(
                x=shift[mask],
                y=np.flatnonzero(mask),
                orientation="h",
                name=words,
                marker={"color": colour},
                unselected={"marker": {"opacity": 1}},
                customdata=[name for name, one in zip(names, mask, strict=True) if one],
                hovertext=[text for text, one in zip(said, mask, strict=True) if one],
                hovertemplate="%{hovertext}<br>moved by %{x:+.2f} powers of two"
                "<br><i>click: the page of this layer</i><extra></extra>",
            )
    plotting.layer_axis(fig, names)
    fig.add_vline(0, line={"color": plotting.GRID, "width": 2})
    fig.update_xaxes(title="shift of the mean exponent, in powers of two", fixedrange=True)
    fig.update_yaxes(fixedrange=True)
    return fig.update_layout(dragmode=False, clickmode="event+select").figure()


def loss_figure(
    steps: Any, losses: Any, recorded: Any, step: int | None, rises: pd.DataFrame
) -> go.Figure:
    """The loss of the recording, a point each, to be clicked.

    Args:
        steps: Of the log.
        losses: At each of them.
        recorded: Which of the steps have recorded gradients, a mask.
        step: The selected step.
        rises: ``loss_rises``.
    """
    fig = plotting.figure(260, hovermode="closest")
    hover = "step %{x}: %{y:.5g}<br><i>click: what moved at this step</i><extra></extra>"
    fig.add_scatter(
        x=steps,
        y=losses,
        name="loss",
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        marker={"size": np.where(recorded, 7, 4), "color": BLUE},
        unselected={"marker": {"opacity": 1}},
        hovertemplate=hover,
    )
    if len(rises):
        fig.add_scatter(
            x=rises["step"],
            y=rises["loss"],
            name="largest rises",
            mode="markers",
            marker={"color": VERMILION, "symbol": "triangle-up", "size": 12},
            unselected={"marker": {"opacity": 1}},
            hovertemplate=hover,
        )
    if step is not None:
        fig.add_vline(step, line={"color": FATE_COLORS["overflow"], "width": 2, "dash": "dash"})
    fig.update_xaxes(title="step", fixedrange=True)
    fig.update_yaxes(title="loss", fixedrange=True)
    known = np.asarray(losses, float)
    if known.size and np.nanmin(known) > 0 and np.nanmax(known) > 20 * np.nanmin(known):
        fig.update_yaxes(type="log")
        plotting.log10_axis(fig, known)
    return fig.update_layout(dragmode=False, clickmode="event+select").figure()


_NOTHING = "no non-zero values in any recorded step"


def over_time(frame: pd.DataFrame, held: svg.Range, *, log: bool) -> go.Figure:
    """Steps × exponents of one layer (``time_frame``), values upward, with the format's window."""
    if frame.empty:
        return plotting.empty(_NOTHING)
    low, high = figure.exponents_shown(frame, held)
    steps = sorted(frame["step"].unique())
    counts = figure.matrix(frame, "step", steps, low, high)
    labels = np.repeat([[str(s) for s in steps]], counts.shape[1], axis=0)
    fig = plotting.figure(440, hovermode="closest")
    hover = "step %{text}<br>from 2^%{y:.0f}: %{customdata:,} values"
    cells = {"y": np.arange(low, high) + 0.5, "customdata": counts.T, "text": labels}
    fates = figure.fates_of(counts, low, held)
    for name, part in figure.shades(counts, fates, log=log):
        said = f"{hover}<extra>{figure.FATE_WORDS[name]}</extra>"
        figure.add_cells(fig, name, counts, part, z=part.T, hovertemplate=said, **cells)
    places = list(range(0, len(steps), max(1, len(steps) // 10)))
    plotting.exponent_axis(fig, low, high, figure.VALUES)
    fig.update_yaxes(**fig.layout["xaxis"])
    fig.layout["xaxis"] = {
        "title": "recorded step",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [str(steps[i]) for i in places],
        "gridcolor": plotting.GRID,
        "range": [-0.5, len(steps) - 0.5],
    }
    for place, words, colour in (
        (held.zero, "↓ 0", VERMILION),
        (held.normal, "↓ subnormal", GREY),
        (held.top, "↑ ∞", PURPLE),
    ):
        if low < place < high:
            font = {"size": 12, "color": WORDS_INK}
            label = {"text": words, "font": font, "bgcolor": WORDS_GROUND}
            fig.add_hline(place, label, line={"color": colour, "width": 1.5, "dash": "dot"})
    return fig.figure()
