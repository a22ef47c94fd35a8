"""Opens databases that others wrote: for reading only, and without running code that they hold."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONGEST = 1 << 24
"""The longest value, in bytes; anything longer counts as damaged."""


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A database, for reading only.

    Raises:
        sqlite3.Error: While it is read, if it is damaged.
    """
    with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as base:
        # Bytes that are not valid text must not stop the reading.
        base.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # Hostile files: code in the schema, values of a gigabyte.
        base.execute("PRAGMA trusted_schema = OFF")
        if hasattr(base, "setlimit"):  # Python 3.11
            base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        yield base


def tables_of(base: sqlite3.Connection) -> set[str]:
    """Real tables only: reading a view or a virtual table may never end."""
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND sql LIKE 'CREATE TABLE%' AND rootpage > 0"
    )
    return {name for (name,) in base.execute(query)}


def columns_of(base: sqlite3.Connection, table: str) -> set[str]:
    """The names of a table's columns."""
    return {row[1] for row in base.execute(f"PRAGMA table_info({quoted(table)})")}


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'
