"""Marks that follow a slider over a figure that stays.

To Streamlit a figure of which anything changed is another one, which a browser draws anew. A figure of
which only the mark of the selected scale changes is therefore sent without it and stays as it is; a
component draws the mark into it.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.reports.plotting import SELECTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import plotly.graph_objects as go

    from mpdiag.reports.picture import Picture

_marks = st.components.v2.component(
    "mpdiag_moving_marks",
    js=Path(__file__).with_name("moving_marks.js").read_text(encoding="utf-8"),
    isolate_styles=False,
)


@contextmanager
def left_out(figure: go.Figure) -> Iterator[list[dict[str, Any]]]:
    """A figure without the marks of the selected scale, for as long as it is sent.

    A copy would be checked by Plotly once more, which takes as long as making it.

    Yields:
        Each vertical line with its words, as ``moving_marks.js`` reads them.
    """
    shapes, notes = figure.layout.shapes, figure.layout.annotations
    lines = [shape for shape in shapes if shape.name == SELECTED]
    words = [note for note in notes if note.name == SELECTED]
    if not lines:
        yield []
        return
    figure.layout.shapes = [shape for shape in shapes if shape.name != SELECTED]
    figure.layout.annotations = [note for note in notes if note.name != SELECTED]
    try:
        yield [_mark(line, note) for line, note in zip(lines, words, strict=True)]
    finally:
        figure.layout.shapes, figure.layout.annotations = shapes, notes


def _mark(line: Any, words: Any) -> dict[str, Any]:
    return {
        "x": line.x0,
        "color": line.line.color,
        "width": line.line.width,
        "dash": line.line.dash,
        "text": words.text,
        "ink": words.font.color,
        "size": words.font.size,
        "anchor": words.xanchor,
        "shift": words.yshift or 0,
    }


def draw(picture: Picture, marks: list[dict[str, Any]], alt: str) -> None:
    """Draw marks into the figure of the card that this is called in, and say what it shows.

    Args:
        picture: Whose figure the card holds.
        marks: As ``left_out`` gives them.
        alt: The figure's words for those who do not see it, which may change with the marks.
    """
    _marks(key=f"marks-{picture.key}", data={"marks": marks, "alt": alt})
