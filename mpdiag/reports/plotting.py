"""What all figures share. The ground is transparent, so that light and dark pages show through."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mpdiag.display.colors import SERIES
from mpdiag.display.wording import in_figure

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
MARK = 17
"""Pixels of a line of words above a figure."""
LETTER = 8
"""Pixels of a letter of such words, at most."""
LABEL = 26
"""Characters of a layer's name beside an axis."""
_MOST_LABELS = 45


class Drawing(go.Figure):  # type: ignore[misc]
    """A Plotly figure, and the calls that several pictures are made with."""

    def line(
        self,
        x: Any,
        y: Any,
        name: str,
        colour: str,
        hover: str,
        *,
        dash: str = "solid",
        width: float = 2.5,
        shape: str = "linear",
        **trace: Any,
    ) -> None:
        """A line; ``hover`` is what it says under the pointer, ``trace`` whatever else Plotly takes."""
        line = {"color": colour, "width": width, "dash": dash, "shape": shape}
        drawn = {"mode": "lines", "line": line, "hovertemplate": hover, **trace}
        self.add_scatter(x=x, y=y, name=name, **drawn)

    def marks(
        self,
        x: Any,
        y: Any,
        name: str,
        colour: str,
        hover: str,
        *,
        mark: tuple[Any, int],
        **trace: Any,
    ) -> None:
        """Marks, each at a place of its own; ``mark`` is their symbol and its size."""
        marker = {"color": colour, "symbol": mark[0], "size": mark[1]}
        drawn = {"mode": "markers", "marker": marker, "hovertemplate": hover}
        self.add_scatter(x=x, y=y, name=name, **drawn, **trace)

    def key(self, words: str, colour: str, opacity: float | None = None) -> None:
        """An entry of the legend: what a colour means."""
        marker: dict[str, Any] = {"color": colour, "symbol": "square", "size": 11}
        if opacity is not None:
            marker["opacity"] = opacity
        self.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=words)

    def line_above(self, words: str) -> None:
        """A line of words at the top edge, above two lines of marks."""
        title = {"text": in_figure(words), "font": {"size": 13}, "x": 0, "xref": "container"}
        title |= {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 6, "l": 8}}
        self.update_layout(title=title, margin={"t": 12 + 3 * MARK})


def figure(height: int = 380, **layout: Any) -> Drawing:
    """An empty figure in the common style, to draw on."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": LINE, "automargin": True}
    fig = Drawing(
        layout={
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
    fig.update_layout(**layout)
    return fig


_DASHES = ("solid", "dash", "dot", "dashdot")


def run_styles(
    names: Iterable[str], places: Mapping[str, int] = MappingProxyType({})
) -> dict[str, dict[str, str]]:
    """The colour and the dash of each run of a figure, alike in all figures.

    Args:
        names: The runs, in the order of the figure.
        places: Each run's place among all runs, as ``views.runs.places`` gives it; a run without one,
            or whose place is taken by an earlier run of the figure, takes the next that is free.
    """
    found: dict[int, str] = {}
    for name in names:
        place = places.get(name, 0)
        while place in found:
            place += 1
        found[place] = name
    return {
        name: {
            "colour": SERIES[place % len(SERIES)],
            "dash": _DASHES[(place + place // len(SERIES)) % len(_DASHES)],
        }
        for place, name in found.items()
    }


def empty(sentence: str) -> go.Figure:
    """A figure that says why there is nothing to draw."""
    fig = figure(140)
    fig.add_annotation(text=in_figure(sentence), showarrow=False, x=0.5, y=0.5, xref="paper")
    return fig.update_xaxes(visible=False).update_yaxes(visible=False)


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


def exponent_axis(fig: go.Figure, low: int, high: int, title: str | None) -> None:
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
    words_above(fig, place, words, colour, side, line)


def words_above(
    fig: Drawing, place: float, words: str, colour: str, side: str, line: int = 0
) -> None:
    """Words above the plot; arguments as of ``range_mark``, but they may stand in the ``center``."""
    above = {"yref": "paper", "yanchor": "bottom", "yshift": MARK * line, "xanchor": side}
    font = {"size": 12, "color": colour}
    fig.add_annotation(x=place, y=1, text=words, showarrow=False, font=font, **above)


def log10_axis(fig: Drawing, values: object, axis: str = "y") -> None:
    """Ticks of an axis at 1, 2 and 5 times powers of ten, each written out."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known) & (known > 0)]
    if known.size == 0:
        return
    low, high = float(known.min()), float(known.max())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    places = [m * 10.0**e for e in decades for m in steps]
    update = fig.update_yaxes if axis == "y" else fig.update_xaxes
    update(tickmode="array", tickvals=places, ticktext=[f"{p:g}" for p in places])


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
