"""Figures of layers over the steps, of the module tree, and of a step against those before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.display.colors import BLUE, FATE_COLORS, GREEN, ORANGE, PURPLE, VERMILION
from mpdiag.display.wording import in_figure, layer_name, magnitude, percent
from mpdiag.reports.plotting import (
    GRID,
    empty,
    figure,
    layer_axis,
    log10_axis,
    row_height,
)

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.reports.plotting import Drawing

_LEAST, _MOST = 1e-4, 1.0
"""Shares from the palest to the full colour of the module tree."""
_TINTS = (("#dbe9f5", 0.0), ("#f3b562", 0.5), ("#b84a00", 1.0))


def tree_figure(frame: pd.DataFrame) -> go.Figure:
    """The module tree (``tree_frame``): an area is a number of layers, a colour a share lost."""
    if frame.empty:
        return empty("no layers")
    shares = frame["sum_share"].to_numpy(float)
    labels = [in_figure(label or layer_name("")) for label in frame["label"]]
    said = ["" if math.isnan(s) else percent(float(s)) for s in shares]
    root = frame["layer"] == ""
    fig = figure(380, margin={"l": 4, "r": 4, "t": 4, "b": 4})
    fig.add_treemap(
        ids=[layer_name(str(name)) for name in frame["layer"]],
        labels=labels,
        parents=[
            "" if top else layer_name(str(p)) for p, top in zip(frame["parent"], root, strict=True)
        ],
        values=frame["leaves"],
        branchvalues="total",
        text=said,
        texttemplate="%{label}<br>%{text}",
        hovertext=[
            f"{in_figure(str(name))}<br>"
            + (f"loses {words} of its sum" if words else "not recorded")
            for name, words in zip(frame["layer"], said, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        marker={"colors": [_tint(share) for share in shares], "line": {"width": 1}},
        tiling={"pad": 2},
        pathbar={"visible": True, "thickness": 22},
    )
    bar = {
        "tickvals": [-4, -3, -2, -1, 0],
        "ticktext": ["≤ 0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
        "thickness": 12,
    }
    scale = {"colorscale": [[place, colour] for colour, place in _TINTS], "showscale": True}
    scale |= {"cmin": math.log10(_LEAST), "cmax": math.log10(_MOST), "colorbar": bar}
    fig.add_scatter(
        x=[None], y=[None], marker={"color": [0.0], **scale}, mode="markers", showlegend=False
    )
    return fig.update_xaxes(visible=False).update_yaxes(visible=False).figure()


def _tint(share: float) -> str:
    """The colour of a share of the module tree; grey where it is not known."""
    if math.isnan(share):
        return "#9aa3b0"
    place = math.log10(min(max(share, _LEAST), _MOST)) / -math.log10(_LEAST) + 1
    low, high = (_TINTS[0], _TINTS[1]) if place < _TINTS[1][1] else (_TINTS[1], _TINTS[2])
    part = (place - low[1]) / (high[1] - low[1])
    mixed = [
        round(int(low[0][i : i + 2], 16) * (1 - part) + int(high[0][i : i + 2], 16) * part)
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


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
        return empty("not recorded in any step")
    rows = 3 if len(updates) else 2
    fig = figure(170 * rows + 50, hovermode="x")
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
    fig: Drawing, x: Any, y: Any, name: str, colour: str, axis: str, dash: str = "solid"
) -> None:
    hover = "%{y:.2%}" if axis == "y" else "2^%{y:.1f}"
    dots = {"marker": {"size": 4}, "yaxis": axis}
    fig.dotted_line(x, y, name, colour, hover, width=2, dash=dash, **dots)


def movement_figure(frame: pd.DataFrame, most: int = 20) -> go.Figure:
    """The layers that moved most at a step (``movement_frame``), a bar each."""
    worst = frame.head(most)
    if worst.empty:
        return empty("nothing was recorded before this step to compare with")
    names = [str(name) for name in worst["layer"]]
    fig = figure(row_height(len(names)), hovermode="closest")
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
    layer_axis(fig, names)
    fig.add_vline(0, line={"color": GRID, "width": 2})
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
    fig = figure(260, hovermode="closest")
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
        log10_axis(fig, known)
    return fig.update_layout(dragmode=False, clickmode="event+select").figure()
