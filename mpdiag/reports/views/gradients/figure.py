"""Where values lie among the powers of two, and the window of a format that a loss scale moves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.display import svg
from mpdiag.display.colors import BLUE, FATE_COLORS, GREEN, PURPLE, VERMILION
from mpdiag.display.wording import in_figure, percent, shortened, superscript
from mpdiag.reports.plotting import (
    GRID,
    LABEL,
    MARK,
    SELECTED,
    empty,
    exponent_axis,
    figure,
    layer_axis,
    range_mark,
    row_height,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.reports.plotting import Drawing

VALUES = "value before scaling"
WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"
DECADES = 6
"""Powers of ten from a full colour to the palest, with log counts."""
MOST = 24
"""Layers in a figure of the worst of them."""
FATE_WORDS = {"zero": "already 0", **svg.FATES}


def window(fmt: FloatFormat, exponent: int) -> tuple[float, float, float]:
    """Where a format's window lies before scaling, as exponents.

    Returns:
        log2 of the largest value lost to zero, of the smallest normal one, of the overflow
        threshold, each divided by the loss scale 2^exponent.
    """
    top = math.log2(fmt.overflow_threshold)
    return fmt.zero_exponent - exponent, fmt.min_exponent - exponent, top - exponent


def fate(bin_exponent: int, fmt: FloatFormat, exponent: int) -> str:
    """What becomes of the values of one bin; of the bin that holds a threshold, of most of them."""
    return svg.fate(bin_exponent, *window(fmt, exponent))


def heat_map(
    frame: pd.DataFrame,
    layers: Sequence[str],
    fmt: FloatFormat,
    exponent: int,
    *,
    log: bool = True,
    height: int | None = None,
    clickable: bool = False,
) -> go.Figure:
    """Layers × exponents, shaded by share of a layer's values, with the format's window.

    Args:
        frame: As ``exponent_frame`` makes it.
        layers: Order of the rows, top first.
        fmt: The format.
        exponent: log2 of the loss scale.
        log: Shade by the logarithm of the share.
        height: In pixels; by default as many as the rows ask for.
        clickable: Whether a click anywhere in a row selects its layer.
    """
    if frame.empty:
        return empty("no non-zero values")
    low, high = exponents_shown(frame, fmt, exponent)
    counts = _matrix(frame, "layer", layers, low, high)
    fig = figure(height or row_height(len(layers)), hovermode="closest")
    # Under rows that are clicked no cell is pointed at: what it would say need not be sent.
    labels = np.repeat(np.array([[in_figure(n)] for n in layers]), counts.shape[1], axis=1)
    pointed = {} if clickable else {"customdata": counts, "text": labels}
    for name, part in _shades(counts, low, fmt, exponent, log=log):
        hover = (
            "%{text}<br>from 2^%{x:.0f}: %{customdata:,} values"
            f"<extra>{FATE_WORDS[name]}</extra>"
        )
        fig.add_heatmap(
            x=np.arange(low, high) + 0.5,
            z=part,
            name=name,
            **({"hoverinfo": "skip"} if clickable else {"hovertemplate": hover}),
            **pointed,
            **_cells(name),
        )
        _legend(fig, name, counts, part)
    layer_axis(fig, layers)
    add_window(fig, fmt, exponent, low, high)
    exponent_axis(fig, low, high, VALUES)
    if clickable:
        _add_rows(fig, layers, counts, low, fmt, exponent)
    if height is not None:
        fixed_rows(fig, layers)
    return fig.figure()


def fixed_rows(
    fig: Drawing, layers: Sequence[str], *, labels: bool = True, top: int = 12 + 2 * MARK
) -> None:
    """Margins that no legend and no label moves: rows of two figures side by side stay level.

    They are also drawn in half the time: a browser measures no labels to find its margins.

    Args:
        fig: To lay out.
        layers: Of its rows.
        labels: Whether rows are labelled.
        top: Pixels above the rows; by default two lines of words.
    """
    longest = max((len(shortened(name, LABEL)) for name in layers), default=0)
    left = 16 + 7 * longest if labels else 8
    margin = {"l": left, "r": fig.layout["margin"]["r"], "t": top, "b": 118, "autoexpand": False}
    # Two columns of words fit under the narrowest figure: one column would reach the axis's words.
    words = {"entrywidth": 118, "entrywidthmode": "pixels"}
    fig.update_layout(margin=margin, legend=words)


def _add_rows(
    fig: Drawing,
    layers: Sequence[str],
    counts: np.ndarray,
    low: int,
    fmt: FloatFormat,
    exponent: int,
) -> None:
    """An invisible bar over each row, which is what a click selects: cells report no selection.

    Its words under the pointer are those of the whole row.
    """
    fates = np.array([fate(low + i, fmt, exponent) for i in range(counts.shape[1])])
    whole = np.maximum(counts.sum(axis=1), 1)
    words = [in_figure(name) for name in layers]
    for name, spoken in FATE_WORDS.items():
        part = counts[:, fates == name].sum(axis=1)
        said = [f"<br>{spoken}: {percent(float(p))}" if p else "" for p in part / whole]
        words = [before + more for before, more in zip(words, said, strict=True)]
    unseen = {"marker": {"opacity": 0}}
    fig.add_bar(
        y=list(range(len(layers))),
        base=low,
        x=[counts.shape[1]] * len(layers),
        width=1,
        orientation="h",
        marker={"color": BLUE, "opacity": 0},
        selected=unseen,
        unselected=unseen,
        showlegend=False,
        customdata=[str(name) for name in layers],
        hovertext=words,
        hovertemplate="%{hovertext}<br><i>click: the page of this layer</i><extra></extra>",
    )
    # Nothing to zoom into: on a phone a finger on the figure scrolls the page.
    fig.update_layout(dragmode=False, clickmode="event+select")
    fig.update_xaxes(fixedrange=True)
    fig.update_yaxes(fixedrange=True)


def over_time(
    frame: pd.DataFrame, fmt: FloatFormat, exponent: int, *, log: bool = True
) -> go.Figure:
    """Steps × exponents of one layer (``time_frame``), values upward, with the format's window."""
    if frame.empty:
        return empty("no non-zero values in any recorded step")
    low, high = exponents_shown(frame, fmt, exponent)
    steps = sorted(frame["step"].unique())
    counts = _matrix(frame, "step", steps, low, high)
    labels = np.repeat([[str(s) for s in steps]], counts.shape[1], axis=0)
    fig = figure(440, hovermode="closest")
    for name, part in _shades(counts, low, fmt, exponent, log=log):
        fig.add_heatmap(
            y=np.arange(low, high) + 0.5,
            z=part.T,
            customdata=counts.T,
            text=labels,
            name=name,
            hovertemplate="step %{text}<br>from 2^%{y:.0f}: %{customdata:,} values"
            f"<extra>{FATE_WORDS[name]}</extra>",
            **_cells(name),
        )
        _legend(fig, name, counts, part)
    every = max(1, len(steps) // 10)
    places = list(range(0, len(steps), every))
    exponent_axis(fig, low, high, VALUES)
    fig.update_yaxes(**fig.layout["xaxis"])
    fig.layout["xaxis"] = {
        "title": "recorded step",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [str(steps[i]) for i in places],
        "gridcolor": GRID,
        "range": [-0.5, len(steps) - 0.5],
    }
    for place, words in zip(window(fmt, exponent), ("↓ 0", "↓ bits lost", "↑ ∞"), strict=True):
        if low < place < high:
            fig.add_hline(
                place,
                line={
                    "color": VERMILION if words != "↑ ∞" else PURPLE,
                    "width": 1.5,
                    "dash": "dot",
                },
                words={
                    "text": words,
                    "font": {"size": 12, "color": WORDS_INK},
                    "bgcolor": WORDS_GROUND,
                },
            )
    return fig.figure()


def histogram(
    frame: pd.DataFrame, zeros: int, fmt: FloatFormat, exponent: int, *, log: bool = True
) -> go.Figure:
    """One histogram, each bar coloured by its fate; the values that are 0 stand apart at the left.

    Args:
        frame: ``exponent`` and ``count``.
        zeros: How many values are 0.
        fmt: The format.
        exponent: log2 of the loss scale.
        log: Counts on a log scale.
    """
    if frame.empty:
        return empty("no non-zero values")
    low, high = exponents_shown(frame, fmt, exponent)
    fig = figure(360, barmode="overlay")
    if zeros:
        label = FATE_WORDS["zero"]
        fig.add_bar(
            x=[low - 1.5],
            y=[zeros],
            width=1.6,
            marker={"color": FATE_COLORS["zero"]},
            name=label,
            hovertemplate=f"{zeros:,} values are 0<extra></extra>",
        )
    fates = frame["exponent"].map(lambda e: fate(int(e), fmt, exponent))
    whole = int(frame["count"].sum())
    for name in ("lost", "subnormal", "kept", "overflow"):
        part = frame[fates == name]
        if part.empty:
            continue
        share = percent(int(part["count"].sum()) / whole)
        fig.add_bar(
            x=part["exponent"] + 0.5,
            y=part["count"],
            width=0.94,
            marker={"color": FATE_COLORS[name]},
            name=f"{FATE_WORDS[name]}: {share}",
            customdata=part["exponent"],
            hovertemplate="2^%{customdata}: %{y:,} values<extra>" + FATE_WORDS[name] + "</extra>",
        )
    add_window(fig, fmt, exponent, low, high)
    exponent_axis(fig, low, high, VALUES)
    if zeros:
        axis = fig.layout["xaxis"]
        some = [i for i, place in enumerate(axis["tickvals"]) if place > low]
        fig.update_xaxes(
            range=[low - 3, high],
            tickvals=[low - 1.5, *(axis["tickvals"][i] for i in some)],
            ticktext=["0", *(axis["ticktext"][i] for i in some)],
        )
    fig.update_yaxes(type="log" if log else "linear", title="values", exponentformat="power")
    return fig.figure()


def consequences(frame: pd.DataFrame, most: int = MOST) -> go.Figure:
    """What each layer loses at the chosen scale (``scale_frame``), the worst first.

    A bar: share of non-zero values that become 0; a diamond: share of Σ|x|; a cross: it overflows.
    """
    sums = (1000 * frame["sum_share"]).round()  # finer differences are within the estimate's error
    order = np.lexsort((-frame["lost_share"], -sums, -frame["overflow_share"]))
    worst = frame.iloc[order[:most]]
    if worst.empty:
        return empty("no layers")
    names = [str(name) for name in worst["layer"]]
    places = list(range(len(names)))
    fig = figure(row_height(len(names)))
    hover = "%{customdata}: %{x:.2%}<extra>%{fullData.name}</extra>"
    labels = [in_figure(name) for name in names]
    fig.add_bar(
        x=worst["lost_share"],
        y=places,
        orientation="h",
        name="values lost",
        marker={"color": FATE_COLORS["lost"], "opacity": 0.75},
        customdata=labels,
        hovertemplate=hover,
    )
    fig.add_scatter(
        x=worst["sum_share"],
        y=places,
        mode="markers",
        name="Σ|x| lost",
        marker={"color": BLUE, "symbol": "diamond", "size": 9},
        customdata=labels,
        hovertemplate=hover,
    )
    over = worst.reset_index(drop=True)
    over = over[over["overflow"] > 0]
    if len(over):
        fig.add_scatter(
            x=over["overflow_share"],
            y=list(over.index),
            mode="markers",
            name="overflows",
            marker={"color": PURPLE, "symbol": "x", "size": 11},
            customdata=[in_figure(str(n)) for n in over["layer"]],
            hovertemplate=hover,
        )
    layer_axis(fig, names)
    fixed_rows(fig, names, top=16)
    fig.update_xaxes(tickformat=".2~%", rangemode="tozero", title="share of the layer")
    top = float(max(worst["lost_share"].max(), worst["sum_share"].max(), 0.01))
    fig.update_xaxes(range=[-0.01 * top, min(1.02, 1.1 * top)])
    return fig.figure()


def every_scale(
    frame: pd.DataFrame, exponent: int, interval: tuple[float, float] | None, recommended: int
) -> go.Figure:
    """What is lost at every loss scale (``every_scale_frame``), the recommended interval shaded.

    Args:
        frame: The table.
        exponent: log2 of the scale chosen.
        interval: log2 of the smallest sufficient and the largest admissible scale, if known.
        recommended: log2 of the recommended scale.
    """
    fig = figure(230, margin={"t": MARK + 4})
    hover = "scale 2^%{x}: %{y:.3%}<extra>%{fullData.name}</extra>"
    for column, name, colour, dash in (
        ("lost_share", "values lost, all layers", FATE_COLORS["lost"], "solid"),
        ("worst_sum_share", "Σ|x| lost, worst layer", BLUE, "dash"),
    ):
        fig.add_scatter(
            x=frame["scale_exponent"],
            y=frame[column],
            name=name,
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2.5},
            marker={"size": 5},
            hovertemplate=hover,
        )
    over = frame[frame["overflow_layers"] > 0]
    if len(over):
        fig.add_scatter(
            x=over["scale_exponent"],
            y=[0.0] * len(over),
            name="layers overflow",
            mode="markers",
            marker={"color": PURPLE, "symbol": "x", "size": 9},
            customdata=over["overflow_layers"],
            hovertemplate="scale 2^%{x}: %{customdata} layers overflow<extra></extra>",
        )
    low, high = int(frame["scale_exponent"].min()), int(frame["scale_exponent"].max())
    if interval is not None and interval[0] <= interval[1]:
        left, right = max(low - 0.5, interval[0] - 0.5), min(high + 0.5, interval[1] + 0.5)
        # On a phone the word takes a quarter of the axis, and stands within the interval or not at all.
        words = "recommended" if right - left > 0.27 * (high - low) else ""
        fig.add_vrect(
            left,
            right,
            fillcolor=GREEN,
            opacity=0.16,
            line_width=0,
            words={"text": words, "font": {"size": 12}},
        )
    fig.add_vline(recommended, line={"color": GREEN, "width": 2, "dash": "dash"})
    fig.add_vline(
        exponent,
        line={"color": VERMILION, "width": 2},
        words={"text": f"2{superscript(exponent)}", "font": {"size": 13}, "name": SELECTED},
        name=SELECTED,
    )
    exponent_axis(fig, low, high, "loss scale")
    fig.update_xaxes(range=[low - 0.7, high + 0.7])
    fig.update_yaxes(tickformat=".0%", rangemode="tozero", title="share lost", nticks=5)
    return fig.figure()


def exponents_shown(frame: pd.DataFrame, fmt: FloatFormat, exponent: int) -> tuple[int, int]:
    """Exponents to show: what is occupied, and the window's ends where they are near."""
    low, high = int(frame["exponent"].min()), int(frame["exponent"].max()) + 1
    zero, _, top = window(fmt, exponent)
    if zero > low - 24:
        low = min(low, math.floor(zero) - 3)
    if top < high + 24:
        high = max(high, math.ceil(top) + 3)
    return low - 1, high + 1


def _matrix(
    frame: pd.DataFrame, label: str, order: Sequence[object], low: int, high: int
) -> np.ndarray:
    place = {value: i for i, value in enumerate(order)}
    counts = np.zeros((len(order), high - low), np.int64)
    known = frame[frame[label].isin(place)]
    rows = known[label].map(place).to_numpy(np.int64)
    counts[rows, known["exponent"].to_numpy() - low] = known["count"].to_numpy()
    return counts


def _shades(
    counts: np.ndarray, low: int, fmt: FloatFormat, exponent: int, *, log: bool
) -> list[tuple[str, np.ndarray]]:
    """For each fate that occurs, how strongly to colour each cell: 0.12 to 1, NaN elsewhere."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    some = np.where(counts > 0, shares, np.nan)
    depth = np.clip(1 + np.log10(some) / DECADES, 0, 1) if log else some / _largest(some)
    fates = np.array([fate(low + i, fmt, exponent) for i in range(counts.shape[1])])
    found = []
    for name in ("lost", "subnormal", "kept", "overflow"):
        mine = (fates == name)[None, :] & (counts > 0)
        if mine.any():
            found.append((name, np.where(mine, 0.12 + 0.88 * depth, np.nan)))
    return found


def _largest(shares: np.ndarray) -> float:
    return float(np.nanmax(shares)) if np.isfinite(shares).any() else 1.0


def _legend(fig: Drawing, name: str, counts: np.ndarray, part: np.ndarray) -> None:
    """What a colour means, and which share of all values it holds."""
    here = percent(int(counts[np.isfinite(part)].sum()) / max(1, int(counts.sum())))
    fig.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"color": FATE_COLORS[name], "symbol": "square", "size": 11},
        name=f"{FATE_WORDS[name]}: {here}",
    )


def _tint(name: str) -> list[list[object]]:
    """A colour scale that runs from nearly transparent to a fate's full colour."""
    red, green, blue = (int(FATE_COLORS[name][i : i + 2], 16) for i in (1, 3, 5))
    return [[0.0, f"rgba({red}, {green}, {blue}, 0)"], [1.0, f"rgba({red}, {green}, {blue}, 1)"]]


def _cells(name: str) -> dict[str, Any]:
    return {
        "colorscale": _tint(name),
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
    }


def add_window(fig: Drawing, fmt: FloatFormat, exponent: int, low: int, high: int) -> None:
    """The ends of a format's range at a loss scale, as far as they lie between two exponents."""
    zero, normal, top = window(fmt, exponent)
    marks = (
        (zero, "0 ←", FATE_COLORS["lost"], "solid", "right", 0),
        (normal, "bits lost ←", FATE_COLORS["subnormal"], "dot", "right", 1),
        (top, "→ ∞", FATE_COLORS["overflow"], "solid", "left", 0),
    )
    for place, words, colour, dash, anchor, line in marks:
        if low < place < high:
            range_mark(fig, place, words, colour, anchor, dash, line)
