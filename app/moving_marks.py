"""Marks that follow a slider over a figure that stays.

To Streamlit a figure of which anything changed is another figure, which a browser draws anew. A figure of
which only the mark of the selected scale changes is therefore sent without it and stays as it is; a
component draws the mark into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import streamlit as st

from mpdiag.reports.plotting.style import SELECTED

if TYPE_CHECKING:
    from mpdiag.reports.picture import Picture

_marks = st.components.v2.component(
    "mpdiag_moving_marks",
    js=Path(__file__).with_name("moving_marks.js").read_text(encoding="utf-8"),
    isolate_styles=False,
)


def split(figure: go.Figure) -> tuple[go.Figure, list[dict[str, Any]]]:
    """A figure without the marks of the selected scale, and those marks.

    Returns:
        The figure, and each vertical line with its words as ``moving_marks.js`` reads them.
    """
    lines = [shape for shape in figure.layout.shapes if shape.name == SELECTED]
    words = [note for note in figure.layout.annotations if note.name == SELECTED]
    if not lines:
        return figure, []
    rest = go.Figure(figure)
    rest.layout.shapes = [shape for shape in figure.layout.shapes if shape.name != SELECTED]
    rest.layout.annotations = [n for n in figure.layout.annotations if n.name != SELECTED]
    marks = [
        {
            "x": line.x0,
            "color": line.line.color,
            "width": line.line.width,
            "dash": line.line.dash,
            "text": note.text,
            "ink": note.font.color,
            "size": note.font.size,
            "anchor": note.xanchor,
            "shift": note.yshift or 0,
        }
        for line, note in zip(lines, words, strict=True)
    ]
    return rest, marks


def draw(picture: Picture, marks: list[dict[str, Any]], alt: str) -> None:
    """Draw marks into the figure of the card that this is called in, and say what it shows.

    Args:
        picture: Whose figure the card holds.
        marks: As ``split`` gives them.
        alt: The figure's words for those who do not see it, which may change with the marks.
    """
    _marks(key=f"marks-{picture.key}", data={"marks": marks, "alt": alt})
