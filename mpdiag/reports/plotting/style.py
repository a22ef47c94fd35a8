"""What all figures share: a transparent ground, so that light and dark pages show through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.display.wording import in_figure
from mpdiag.reports.plotting.drawing import Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

GRID = "rgba(128, 136, 150, 0.22)"
LINE = "rgba(128, 136, 150, 0.6)"
FONT = "Source Sans, Source Sans Pro, Inter, system-ui, sans-serif"
LEGEND = {
    "orientation": "h",
    "x": 0,
    "xref": "container",
    "y": 0,
    "yref": "container",
    "yanchor": "bottom",
}
"""Below the figure: above it a phone's toolbar, marks and a legend of several lines meet."""
SELECTED = "selected"
"""The name of a mark that follows the scale selected, of its line and of its words."""
MARK = 17
"""Pixels of a line of words above a figure."""
LETTER = 8
"""Pixels of a letter of such words, at most."""
LABEL = 26
"""Characters of a layer's name beside an axis."""
_MOST_LABELS = 45


def figure(height: int = 380, **layout: Any) -> Drawing:
    """An empty figure in the common style, to draw on."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": LINE, "automargin": True}
    fig = Drawing(
        {
            "template": "none",
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 16, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 13},
            "hoverlabel": {"font": {"family": FONT}},
            "legend": LEGEND,
            "xaxis": axis,
            "yaxis": axis,
            "bargap": 0.04,
        }
    )
    return fig.update_layout(**layout)


def empty(sentence: str) -> go.Figure:
    """A figure that says why there is nothing to draw."""
    fig = figure(140)
    fig.add_annotation(text=in_figure(sentence), showarrow=False, x=0.5, y=0.5, xref="paper")
    return fig.update_xaxes(visible=False).update_yaxes(visible=False).figure()


def layer_axis(fig: Drawing, names: Sequence[str], width: int = LABEL) -> None:
    """Label positions 0 … n-1 of the y axis with names, the first on top, as many as fit."""
    every = max(1, -(-len(names) // _MOST_LABELS))
    places = list(range(0, len(names), every))
    fig.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=[in_figure(names[i], width) for i in places],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        # Rows lie within the figure: a browser that measures each label to see so takes a fifth longer.
        ticklabeloverflow="allow",
        title=None,
    )


def exponent_axis(fig: Drawing | go.Figure, low: int, high: int, title: str) -> None:
    """Powers of two along x: position e is the value 2^e."""
    step = next(s for s in (1, 2, 4, 8, 16, 32) if (high - low) / s <= 14)
    first = -(-low // step) * step
    places = list(range(first, high + 1, step))
    fig.update_xaxes(
        title=title,
        tickmode="array",
        tickvals=places,
        ticktext=[f"2<sup>{e}</sup>" for e in places],
        range=[low, high],
    )


def row_height(rows: int) -> int:
    """Height of a figure with a row for each layer."""
    return int(np.clip(110 + 19 * rows, 240, 900))


def range_mark(
    fig: Drawing,
    place: float,
    words: str,
    colour: str,
    side: str,
    dash: str = "solid",
    line: int = 0,
) -> None:
    """A vertical line at an end of a format's range, its words above on one side of it.

    Args:
        fig: To draw on.
        place: Where, on the x axis.
        words: Such as ``0 ←``.
        colour: Of both.
        side: Which end of the words touches the line, ``left`` or ``right``.
        dash: The line's, as Plotly names it.
        line: Of words, from the lowest: marks that come near each other stand on two.
    """
    fig.add_vline(place, line={"color": colour, "width": 2, "dash": dash})
    margin = fig.layout["margin"]
    # Words right of a line that stands at the right edge, as on a phone, need room beyond it.
    beyond = margin["r"] if side == "right" else max(margin["r"], LETTER * len(words))
    fig.update_layout(margin={"t": max(margin["t"], 12 + MARK * (line + 1)), "r": beyond})
    fig.add_annotation(
        x=place,
        y=1,
        yref="paper",
        yanchor="bottom",
        yshift=MARK * line,
        xanchor=side,
        text=words,
        showarrow=False,
        font={"size": 12, "color": colour},
    )


def log10_axis(fig: Drawing, values: object) -> None:
    """Ticks of the y axis at 1, 2 and 5 times powers of ten, each written out."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known) & (known > 0)]
    if known.size == 0:
        return
    low, high = float(known.min()), float(known.max())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    places = [m * 10.0**e for e in decades for m in steps]
    fig.update_yaxes(tickmode="array", tickvals=places, ticktext=[f"{p:g}" for p in places])


def log2_axis(fig: Drawing, values: object) -> None:
    """A y axis of loss scales: powers of two, at most about eight of them labelled."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known) & (known > 0)]
    low = math.floor(np.log2(known.min())) if known.size else 0
    high = math.ceil(np.log2(known.max())) if known.size else 1
    step = max(1, -(-(high - low) // 8))
    places = range(low, high + 1, step)
    fig.update_yaxes(
        type="log",
        title="loss scale",
        tickmode="array",
        tickvals=[2.0**e for e in places],
        ticktext=[f"2<sup>{e}</sup>" for e in places],
        range=[math.log10(2.0) * (low - 0.5), math.log10(2.0) * (high + 0.5)],
    )
