"""HTML for notebooks: everything escaped, no script, colours that a dark page bears, too."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COLOURS = {"error": "#d33", "warning": "#c80", "info": "#28a", "good": "#2a2"}


def card(title: str, *parts: str, mood: str = "good") -> str:
    """A box with a title and parts that are HTML already.

    Args:
        title: Plain text.
        parts: HTML, from the functions below.
        mood: ``good``, ``info``, ``warning`` or ``error``: the colour at its edge.
    """
    colour = _COLOURS.get(mood, _COLOURS["info"])
    return (
        f'<div style="border-left:4px solid {colour};padding:2px 12px;margin:4px 0">'
        f"<strong>{escape(title)}</strong>{''.join(parts)}</div>"
    )


def note(text: str) -> str:
    """A line in small print."""
    return f'<div style="opacity:.7;font-size:.9em">{escape(text)}</div>'


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and what they are, a row each; what is empty is left out."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows
        if value not in (None, "")
    )
    return f"<table>{lines}</table>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers as they are given."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{lines}</table>"


def items(entries: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each with its severity."""
    lines = "".join(
        f'<li><span style="color:{_COLOURS.get(severity, "inherit")}">{escape(severity)}</span>: '
        f"{escape(text)}</li>"
        for severity, text in entries
    )
    return f"<ul>{lines}</ul>" if lines else ""
