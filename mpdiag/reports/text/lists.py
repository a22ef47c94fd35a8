"""Lists that commands print: the runs of a folder, all findings, and the page of one finding."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpdiag.display.explanations import Explanation, listing
from mpdiag.reports.text.tables import COLOURS, Fitted
from mpdiag.runs.run import Listing

SCHEMA_VERSION = 1


def runs_json(listings: Sequence[Listing]) -> dict[str, Any]:
    """The listing as a JSON document: of each run its ``meta.json``, or why it cannot be read."""
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [
            {
                "name": item.folder.name,
                "folder": str(item.folder),
                "problem": item.problem,
                "meta": dict(item.run.meta) if item.run else None,
            }
            for item in listings
        ],
    }


AROUND = 5
"""Lines of a terminal beside the rows: the prompt, the heading, what is left out, the next command."""


def runs_table(listings: Sequence[Listing], lines: int | None = None) -> RenderableType:
    """The listing as a table; below it, why others cannot be read.

    Args:
        listings: The newest first.
        lines: Of the terminal: only the first that fit are shown. None shows all.
    """
    columns = ("run", "state", "model", "steps recorded", "created", "last written")
    table = Fitted(columns, spare=("last written", "model"), boxed=False)
    problems: list[Text] = []
    most = len(listings) if lines is None else max(1, lines - AROUND)
    for item in listings[:most]:
        name = Text(item.folder.name)
        if item.run is None:
            problems.append(Text.assemble(name, (" unreadable: ", "red"), item.problem or ""))
        else:
            table.add_row(name, *(Text(fact) for fact in _facts(item.run.meta)))
    more = len(listings) - most
    rest = [Text(f"and {more:,} older, shown with -v", "dim")] if more > 0 else []
    return Group(table, *problems, *rest)


def _facts(meta: Mapping[str, Any]) -> tuple[str, ...]:
    # meta.json may have been edited by hand: what is missing or unexpected is a dash.
    model = meta.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    recorded, seen = meta.get("steps_recorded"), meta.get("steps_seen")
    return (
        _or_dash(meta.get("state")),
        _or_dash(kind),
        _or_dash(None if recorded is None else f"{recorded} of {_or_dash(seen)}"),
        _moment(meta.get("created")),
        _moment(meta.get("updated")),
    )


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _moment(value: object) -> str:
    """An ISO 8601 moment to the second, as recorded (UTC)."""
    return _or_dash(value)[:19].replace("T", " ")


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
        table.add_column(style="dim", overflow="fold")
        for page in pages:
            severity = page.severity.split()[-1]
            table.add_row(page.code, Text(severity, COLOURS[severity]), page.summary)
        parts += [Text(group, "bold"), Padding(table, (0, 0, 1, 2))]
    words = "mpdiag explain CODE prints a finding's page"
    return Group(*parts, Text(words, "dim"))
