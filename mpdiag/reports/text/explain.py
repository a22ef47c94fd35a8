"""What ``explain`` prints: a finding's page, or the list of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.constrain import Constrain
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpdiag.display.explanations import listing
from mpdiag.reports.text.findings import COLOURS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpdiag.display.explanations import Explanation

WIDTH = 80
"""Columns of a page; longer lines read badly, however wide the terminal is."""
_FENCE = "```text\n"


def explanation_text(page: Explanation) -> RenderableType:
    """A finding's page, at most ``WIDTH`` columns wide."""
    facts = Text.assemble(
        (page.severity, COLOURS[page.severity.split()[-1]]),
        (f" · {page.about} · printed by {page.command}", "dim"),
    )
    parts: list[RenderableType] = [Text(page.code, "bold"), facts, Text(""), Text(page.summary)]
    for title, content in page.sections.items():
        parts += [Text(""), Text(title, "bold"), *_section(content)]
    return Constrain(Group(*parts), WIDTH)


def _section(content: str) -> list[RenderableType]:
    """Sentences as rich draws Markdown; what a program printed is indented as it is."""
    before, fence, after = content.partition(_FENCE)
    if not fence:
        return [Markdown(before, inline_code_theme="ansi_light")]
    printed = Text(after.removesuffix("```").rstrip("\n"))
    return [Markdown(before), Text(""), Padding(printed, (0, 0, 0, 2))]


def listing_text() -> RenderableType:
    """All findings by what they are about, one line each where it fits."""
    parts: list[RenderableType] = []
    for group, pages in listing().items():
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
        for page in pages:
            severity = page.severity.split()[-1]
            table.add_row(page.code, Text(severity, COLOURS[severity]), page.summary)
        parts += [Text(group, "bold"), Padding(table, (0, 0, 1, 2))]
    words = "mpdiag explain CODE prints a finding's page"
    return Group(*parts, Text(words, "dim"))
