"""The list of runs in a folder, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.runs import Listing

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


def runs_table(listings: Sequence[Listing]) -> Table:
    """The listing as a table; a run that cannot be read has its reason in place of its facts."""
    columns = ("run", "state", "model", "steps recorded", "created", "last written")
    table = Table(*columns, box=None, header_style="bold")
    for listing in listings:
        name = Text(listing.folder.name)
        if listing.run is None:
            table.add_row(name, Text("unreadable", "red"), Text(listing.problem or ""))
        else:
            table.add_row(name, *(Text(fact) for fact in _facts(listing.run.meta)))
    return table


def _facts(meta: Mapping[str, Any]) -> tuple[str, ...]:
    # meta.json may be half written by hand: what is not there, or not as expected, is a dash.
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
