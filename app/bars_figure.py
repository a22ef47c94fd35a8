"""A figure of bars that follows a slider, drawn without Plotly.

To Streamlit a figure of which anything changed is another one, and Plotly draws it from nothing: a tenth
of a second of the browser's one thread. A component is handed the new numbers instead, and stays.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.display.wording import percent

if TYPE_CHECKING:
    from mpdiag.reports.picture import Picture

_figure = st.components.v2.component(
    "mpdiag_bars_figure",
    html='<div class="bars-figure" role="figure"></div>',
    js=Path(__file__).with_name("bars_figure.js").read_text(encoding="utf-8"),
    isolate_styles=False,
)


def numbers(figure: Any) -> dict[str, Any]:
    """What ``bars_figure.js`` draws of a Plotly figure of horizontal bars and of marks on their rows.

    Args:
        figure: Its y axis labels each row; its x axis begins at about 0.
    """
    layout = figure.layout
    names = [html.unescape(words) for words in layout.yaxis.ticktext]
    series = [_series(trace, len(names)) for trace in figure.data]
    whole = [html.unescape(name) for name in figure.data[0].customdata]
    return {
        "rows": [
            {"name": name, "hint": _hint(long, i, series)}
            for i, (name, long) in enumerate(zip(names, whole, strict=True))
        ],
        "series": series,
        "axis": layout.xaxis.title.text,
        "top": layout.xaxis.range[1],
        "plot": layout.height - layout.margin.t - layout.margin.b,
        "margin": {side: layout.margin[side] for side in "lrt"},
    }


def _series(trace: Any, rows: int) -> dict[str, Any]:
    """A trace's values, one a row, None where it has none, and how they are drawn."""
    values: list[float | None] = [None] * rows
    for row, value in zip(trace.y, trace.x, strict=True):
        values[int(row)] = float(value)
    marker = trace.marker
    symbol = {"symbol": marker.symbol, "size": marker.size} if trace.type == "scatter" else {}
    shown = {"name": trace.name, "color": marker.color, "opacity": marker.opacity or 1}
    return {**shown, **symbol, "values": values}


def _hint(name: str, row: int, series: list[dict[str, Any]]) -> str:
    """What the pointer is told of a row."""
    told = [
        f"{one['name']} {percent(one['values'][row])}"
        for one in series
        if one["values"][row] is not None
    ]
    return f"{name}: {', '.join(told)}"


def draw(picture: Picture, alt: str) -> None:
    """Draw a picture of bars in the card that this is called in.

    Args:
        picture: Its figure has horizontal bars and marks on their rows, and a row at least.
        alt: The figure's words for those who do not see it.
    """
    with st.container(key=f"figure-{picture.key}"):
        _figure(key=f"bars-{picture.key}", data={**numbers(picture.figure), "alt": alt})
