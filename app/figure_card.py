"""A figure on a page: title, caption, receipt, and files of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.display.wording import in_markdown
from mpdiag.reports.picture import csv_text

if TYPE_CHECKING:
    from mpdiag.reports.picture import Picture

_BUTTONS = (
    '<div><button name="svg">Figure (SVG)</button><button name="png">Figure (PNG)</button></div>'
)
_files = st.components.v2.component(
    "mpdiag_figure_files",
    html=_BUTTONS,
    css=Path(__file__).with_name("figure_files.css").read_text(encoding="utf-8"),
    js=Path(__file__).with_name("figure_files.js").read_text(encoding="utf-8"),
)
CONFIG = {"displayModeBar": False, "displaylogo": False}
"""No toolbar: it would lie over a phone's figure. A double click undoes a zoom; files have buttons."""


def figure_card(picture: Picture, *, selectable: bool = False) -> Any:
    """Show a figure with its caption, its receipt and its downloads.

    Args:
        picture: The figure.
        selectable: Whether the page runs again when a point or a bar of it is clicked.

    Returns:
        The points that are selected, as Streamlit reports them; an empty list without ``selectable``.
    """
    key = f"figure-{picture.key}"
    alt = f"{picture.title}. {picture.caption}"
    options: dict[str, Any] = {"key": key, "config": CONFIG, "alt": alt}
    if selectable:
        options |= {"on_select": "rerun", "selection_mode": "points"}
    with st.container(gap=4):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.header(in_markdown(picture.title), anchor=False, width="content")
            receipt = st.popover("Receipt", icon=":material/receipt_long:", type="tertiary")
        event: Any = st.plotly_chart(picture.figure, **options)
        if picture.caption:
            st.caption(in_markdown(picture.caption))
    with receipt:
        _downloads(picture, key)
    return event["selection"]["points"] if selectable else []


def _downloads(picture: Picture, key: str) -> None:
    st.caption("These numbers in plain pandas, from the run folder alone:")
    st.code(picture.receipt, language="python", wrap_lines=True)
    left, right = st.columns(2)
    left.download_button(
        "Table (CSV)",
        data=lambda: csv_text(picture.frame),
        file_name=f"{picture.key}.csv",
        mime="text/csv",
        key=f"csv-{picture.key}",
        on_click="ignore",
        width="stretch",
    )
    right.download_button(
        "Figure (HTML)",
        data=lambda: picture.figure.to_html(include_plotlyjs=True),
        file_name=f"{picture.key}.html",
        mime="text/html",
        key=f"html-{picture.key}",
        on_click="ignore",
        width="stretch",
    )
    _files(
        key=f"files-{picture.key}",
        data={
            "figure": key,
            "file": picture.key,
            "title": picture.title,
            "caption": picture.caption,
        },
    )
