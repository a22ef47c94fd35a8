"""HTML for notebooks, from ``templates/notebook.html.j2``.

Each function returns ``Markup``, a string that is HTML already; any other text is escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from markupsafe import Markup

_TEMPLATE = "display/templates/notebook.html.j2"
_COLOURS = {"error": "#d33", "warning": "#c80", "info": "#28a", "good": "#2a2"}


def card(title: str, *parts: str, mood: str = "good") -> Markup:
    """A box with a title and what stands below it.

    Args:
        title: Plain text.
        parts: From the functions below; other text is escaped.
        mood: ``good``, ``info``, ``warning`` or ``error``: the colour at its edge.
    """
    return _macro("card", title, [p for p in parts if p], _COLOURS.get(mood, _COLOURS["info"]))


def note(text: str) -> Markup:
    """A line in small print."""
    return _macro("note", text)


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names and their values, a row each; rows without a value are left out."""
    return _macro("facts", [row for row in rows if row[1] not in (None, "")])


def figure(svg: str, words: str = "") -> Markup | str:
    """A picture of ``display.svg``, and how to read it; "" for no picture."""
    if not svg:
        return ""
    from markupsafe import Markup

    drawn = Markup(svg)  # noqa: S704 - made of numbers and escaped names
    return _macro("figure", drawn, words)


def next_step(code: str, words: str = "") -> Markup | str:
    """What to do next: code to copy, or a sentence; "" for neither."""
    return _macro("next_step", code, words) if code or words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; numbers as they are given."""
    return _macro("table", head, list(rows))


def items(entries: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each with its severity; nothing where there are none."""
    rows = [(severity, text, _COLOURS.get(severity, "inherit")) for severity, text in entries]
    return _macro("items", rows) if rows else ""


def _macro(name: str, *arguments: Any) -> Markup:
    from mpdiag.display.rendering import render_macro

    return render_macro(_TEMPLATE, name, *arguments)
