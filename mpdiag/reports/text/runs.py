"""The list of runs in a folder, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from mpdiag.reports.text.tables import Fitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from mpdiag.runs.run import Listing

SCHEMA_VERSION = 1


def runs_json(listings: Sequence[Listing]) -> dict[str, Any]:
    """The listing as a JSON document: of each run its ``meta.json``, or why it cannot be read."""
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [
            {
                "name": listing.folder.name,
                "folder": str(listing.folder),
                "problem": listing.problem,
                "meta": dict(listing.run.meta) if listing.run else None,
            }
            for listing in listings
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
    for listing in listings[:most]:
        name = Text(listing.folder.name)
        if listing.run is None:
            problems.append(Text.assemble(name, (" unreadable: ", "red"), listing.problem or ""))
        else:
            table.add_row(name, *(Text(fact) for fact in _facts(listing.run.meta)))
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
