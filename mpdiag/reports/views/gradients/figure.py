"""Where values lie among the powers of two, and the window of a format that a loss scale moves."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.scaling.necessity import MATTERS
from mpdiag.display.colors import BLUE, FATE_COLORS, GREY, PALE, rgba
from mpdiag.display.wording import in_figure, percent, shortened
from mpdiag.numerics.formats import FloatFormat
from mpdiag.reports import plotting

VALUES = "value before scaling"
DECADES = 6
"""Powers of ten from a full colour to the palest, with log counts."""
FATES = {
    "lost": "becomes 0",
    "rounded": "rounded, harmful",
    "kept": "rounded, harmless",
    "overflow": "becomes ∞",
}
"""What a format makes of a value, in the order of the values."""
_SQUARE = 7 / 3
"""Mean of x² over [1, 2]."""
FATE_WORDS = {"zero": "already 0", **FATES}


@dataclass(frozen=True)
class Range:
    """What a format holds among values before scaling, as exponents of two.

    Attributes:
        zero: Up to 2^zero values become 0.
        normal: From 2^normal on they keep all bits of the format.
        top: From 2^top on they become ∞.
        judged: Whether rounding within the range is told harmful from harmless.
        axis: Of what.
    """

    zero: float
    normal: float
    top: float
    judged: bool = True
    axis: str = VALUES

    def fate(self, exponent: int) -> str:
        """What becomes of values in (2^exponent, 2^(exponent+1)]; of most, where a limit is inside.

        Returns:
            A key of ``FATES``; ``kept`` for all that are rounded, for harm depends on the others.
        """
        if exponent + 1 <= self.zero:
            return "lost"
        return "overflow" if exponent + 0.5 > self.top else "kept"

    def fates(self, counts: Sequence[int], first: int) -> list[str]:
        """What becomes of the values of one row, bin by bin.

        The bins whose rounding moves the row most are ``rounded``, so many that all others together
        move its norm ‖x‖ by at most a share of ``MATTERS``. So one limit judges the formats,
        whatever bits each keeps.

        Args:
            counts: Values in each power of two.
            first: The exponent of the first bin.

        Returns:
            A key of ``FATES`` for each bin.
        """
        found = [self.fate(first + i) for i in range(len(counts))]
        bits = self.normal - self.zero - 1
        energy, moved = 0.0, []
        for i, count in enumerate(counts):
            exponent = first + i
            if count and found[i] != "overflow":
                energy += count * _SQUARE * 4.0**exponent
            if count and found[i] == "kept" and self.judged:
                # A rounding error is uniform over the format's spacing: its mean square is 1/12.
                moved.append((count * 4.0 ** (max(exponent, self.normal) - bits) / 12, i))
        allowed = MATTERS**2 * energy
        for error, i in sorted(moved):
            allowed -= error
            if allowed < 0:
                found[i] = "rounded"
        return found


def window(fmt: FloatFormat, exponent: int) -> Range:
    """A format's range before scaling, at a loss scale of 2^exponent."""
    return Range(
        fmt.zero_exponent - exponent,
        fmt.min_exponent - exponent,
        math.log2(fmt.overflow_threshold) - exponent,
    )


def heat_map(
    frame: pd.DataFrame,
    layers: Sequence[str],
    held: Range,
    *,
    log: bool,
    height: int | None,
    clickable: bool,
    words: str = "",
) -> go.Figure:
    """Layers × exponents (``exponent_frame``), shaded by share of a layer's values, and the window.

    Args:
        frame: The table.
        layers: Order of the rows, top first.
        held: What a format holds.
        log: Shade by the logarithm of the share.
        height: In pixels; None for as many as the rows ask for.
        clickable: Whether a click on a row selects its layer.
        words: A line above the rows.
    """
    if frame.empty:
        return plotting.empty("no non-zero values")
    low, high = exponents_shown(frame, held)
    counts = matrix(frame, "layer", layers, low, high)
    fates = fates_of(counts, low, held)
    fig = plotting.figure(height or plotting.row_height(len(layers)), hovermode="closest")
    # Under rows that are clicked no cell is pointed at: what it would say need not be sent.
    pointed: dict[str, Any] = {"hoverinfo": "skip"}
    if not clickable:
        labels = np.repeat(np.array([[in_figure(n)] for n in layers]), counts.shape[1], axis=1)
        pointed = {"customdata": counts, "text": labels}
    hover = "%{text}<br>from 2^%{x:.0f}: %{customdata:,} values"
    for name, part in shades(counts, fates, log=log):
        said = {} if clickable else {"hovertemplate": f"{hover}<extra>{FATE_WORDS[name]}</extra>"}
        add_cells(fig, name, counts, part, x=np.arange(low, high) + 0.5, z=part, **said, **pointed)
    plotting.layer_axis(fig, layers)
    add_window(fig, held, low, high)
    plotting.exponent_axis(fig, low, high, VALUES)
    if clickable:
        _add_rows(fig, layers, counts, fates, low)
    if words:
        fig.line_above(words)
    if height is not None:
        fixed_rows(fig, layers)
        fig.update_layout(legend={"entrywidth": 165})
    return fig


def fixed_rows(fig: plotting.Drawing, layers: Sequence[str]) -> None:
    """Margins that no legend and no label moves: rows of two figures side by side stay level.

    They are also drawn in half the time: a browser measures no labels to find its margins. Above the
    rows is room for a line of words, and two of marks.
    """
    longest = max((len(shortened(name, plotting.LABEL)) for name in layers), default=0)
    margin = {
        "l": 16 + 7 * longest,
        "r": fig.layout["margin"]["r"],
        "t": 12 + 3 * plotting.MARK,
        "b": 118,
        "autoexpand": False,
    }
    # Two columns of words fit under the narrowest figure: one column would reach the axis's words.
    words = {"entrywidth": 118, "entrywidthmode": "pixels"}
    fig.update_layout(margin=margin, legend=words)


def _add_rows(
    fig: plotting.Drawing, layers: Sequence[str], counts: np.ndarray, fates: np.ndarray, low: int
) -> None:
    """An invisible bar over each row, which is what a click selects: cells report no selection.

    Its words under the pointer are those of the whole row.
    """
    whole = np.maximum(counts.sum(axis=1), 1)
    words = [in_figure(name) for name in layers]
    for name, spoken in FATE_WORDS.items():
        part = np.where(fates == name, counts, 0).sum(axis=1)
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
    fig.update_xaxes(fixedrange=True).update_yaxes(fixedrange=True)


def histogram(
    frame: pd.DataFrame, zeros: int, held: Range, *, log: bool, words: str = ""
) -> go.Figure:
    """One histogram, each bar coloured by its fate; the values that are 0 stand apart at the left.

    Args:
        frame: ``exponent`` and ``count``.
        zeros: How many values are 0.
        held: What a format holds.
        log: Counts on a log scale; else shares of the values.
        words: A line above the bars.
    """
    if frame.empty:
        return plotting.empty("no non-zero values")
    low, high = exponents_shown(frame, held)
    fig = plotting.figure(360, barmode="overlay")
    whole = int(frame["count"].sum())
    if zeros:
        fig.add_bar(
            x=[low - 1.5],
            y=[zeros if log else zeros / whole],
            width=1.6,
            marker={"color": FATE_COLORS["zero"]},
            name=FATE_WORDS["zero"],
            hovertemplate=f"{zeros:,} values are 0<extra></extra>",
        )
    whole_row = matrix(frame.assign(row=0), "row", [0], low, high)
    fates = fates_of(whole_row, low, held)[0][frame["exponent"].to_numpy() - low]
    for name, spoken in (FATES if held.judged else {**FATES, "kept": "rounded"}).items():
        part = frame[fates == name]
        if part.empty:
            continue
        fig.add_bar(
            x=part["exponent"] + 0.5,
            y=part["count"] if log else part["count"] / whole,
            width=0.94,
            marker={"color": rgba(FATE_COLORS[name], PALE.get(name, 1.0))},
            name=f"{spoken}: {percent(int(part['count'].sum()) / whole)}",
            customdata=part[["exponent", "count"]],
            hovertemplate="2^%{customdata[0]}: %{customdata[1]:,} values<extra>"
            f"{spoken}</extra>",
        )
    add_window(fig, held, low, high)
    plotting.exponent_axis(fig, low, high, held.axis)
    if zeros:
        axis = fig.layout["xaxis"]
        some = [i for i, place in enumerate(axis["tickvals"]) if place > low]
        fig.update_xaxes(
            range=[low - 3, high],
            tickvals=[low - 1.5, *(axis["tickvals"][i] for i in some)],
            ticktext=["0", *(axis["ticktext"][i] for i in some)],
        )
    if words:
        fig.line_above(words)
    if log:
        fig.update_yaxes(type="log", title="values", exponentformat="power", dtick=1)
    else:
        fig.update_yaxes(tickformat=".0%", title="share of the values")
    return fig


def exponents_shown(frame: pd.DataFrame, held: Range) -> tuple[int, int]:
    """Exponents to show: what is occupied, and the window's ends where they are near."""
    low, high = int(frame["exponent"].min()), int(frame["exponent"].max()) + 1
    if held.zero > low - 24:
        low = min(low, math.floor(held.zero) - 3)
    if held.top < high + 24:
        high = max(high, math.ceil(held.top) + 3)
    return low - 1, high + 1


def matrix(
    frame: pd.DataFrame, label: str, order: Sequence[object], low: int, high: int
) -> np.ndarray:
    """Counts by row (``order``) and exponent (``low`` to ``high``)."""
    place = {value: i for i, value in enumerate(order)}
    counts = np.zeros((len(order), high - low), np.int64)
    known = frame[frame[label].isin(place)]
    rows = known[label].map(place).to_numpy(np.int64)
    counts[rows, known["exponent"].to_numpy() - low] = known["count"].to_numpy()
    return counts


def fates_of(counts: np.ndarray, low: int, held: Range) -> np.ndarray:
    """What becomes of each cell's values, row by row (``Range.fates``)."""
    found = [held.fates(row, low) for row in counts.tolist()]
    return np.array(found, object).reshape(counts.shape)


def shades(counts: np.ndarray, fates: np.ndarray, *, log: bool) -> Iterator[tuple[str, np.ndarray]]:
    """For each fate that occurs, how strongly to colour each cell: 0.12 to 1, NaN elsewhere."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    some = np.where(counts > 0, shares, np.nan)
    largest = float(shares.max(initial=0.0)) or 1.0
    depth = np.clip(1 + np.log10(some) / DECADES, 0, 1) if log else some / largest
    for name in FATES:
        mine = (fates == name) & (counts > 0)
        if mine.any():
            yield name, np.where(mine, 0.12 + (PALE.get(name, 1.0) - 0.12) * depth, np.nan)


def add_cells(
    fig: plotting.Drawing, name: str, counts: np.ndarray, part: np.ndarray, **trace: Any
) -> None:
    """The cells of one fate, and what their colour means with the share of all values it holds.

    The colour scale runs from nearly transparent to the fate's full colour.
    """
    colour = FATE_COLORS[name]
    fig.add_heatmap(
        name=name,
        colorscale=[[0.0, rgba(colour, 0)], [1.0, rgba(colour, 1)]],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        **trace,
    )
    here = percent(int(counts[np.isfinite(part)].sum()) / max(1, int(counts.sum())))
    fig.key(f"{FATE_WORDS[name]}: {here}", colour, PALE.get(name))


def add_window(fig: plotting.Drawing, held: Range, low: int, high: int) -> None:
    """The ends of a format's range, as far as they lie between two exponents."""
    marks = (
        (held.zero, "0 ←", FATE_COLORS["lost"], "solid", "right", 0),
        (held.normal, "subnormal ←", GREY, "dot", "right", 1),
        (held.top, "→ ∞", FATE_COLORS["overflow"], "solid", "left", 0),
    )
    for place, words, colour, dash, anchor, line in marks:
        if low < place < high:
            plotting.range_mark(fig, place, words, colour, anchor, dash, line)
