"""Reading the parts of statistics, in order and some rows at a time.

A long training leaves hundreds of small parts, and making columns of one costs more than reading it:
small parts are decoded together.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedRun

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from mpdiag.files.paths import AnyPath, Copies
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind

MOST_ROWS = 1 << 22
"""A part is written from 20,000 rows on, after the step that reached them."""
BATCH_ROWS = 65_536
"""Rows of a part read at a time, and of small parts decoded together."""
_HISTOGRAMS = ("counts", "means", "ratio_counts", "formats")
"""Columns that take most of the time, and what was counted for formats with them."""


def records_of(
    paths: Iterable[AnyPath],
    copies: Copies,
    *,
    histograms: bool = True,
    only: tuple[Kind, Collection[str]] | None = None,
) -> Iterator[Records]:
    """The rows of some parts as columns, some at a time, in order.

    Args:
        paths: The parts.
        copies: Of those at a URL.
        histograms: False leaves out the bins and what was counted for formats: several times faster.
        only: A kind and names: the other rows are left out before they are decoded.

    Raises:
        DamagedRun: If one cannot be read, lacks a column or holds nonsense.
    """
    import pyarrow as pa

    group: list[tuple[AnyPath, pa.Table]] = []
    for path in paths:
        for table in tables_of(path, copies, histograms=histograms):
            group.append((path, table if only is None else _selected(table, *only)))
            if sum(len(some) for _, some in group) >= BATCH_ROWS:
                yield _decoded(group)
                group = []
    if group:
        yield _decoded(group)
    pa.default_memory_pool().release_unused()  # some 60 MB otherwise stay with it


def tables_of(path: AnyPath, copies: Copies, *, histograms: bool = True) -> Iterator[pa.Table]:
    """A part's rows as Arrow tables, some at a time; arguments as for ``records_of``.

    Raises:
        DamagedRun: If it cannot be read or lacks a column.
    """
    import pyarrow as pa

    with part_of(path, copies) as part:
        wanted = _wanted(path, part, histograms=histograms)
        for batch in part.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
            yield _as_expected(pa.Table.from_batches([batch]))


@contextmanager
def part_of(path: AnyPath, copies: Copies) -> Iterator[Any]:
    """A Parquet file of a run, opened as a ``pyarrow.parquet.ParquetFile``.

    Runs of equal values are stored once, so that a few KB can hold a billion rows. The number of rows is
    read from the footer before anything is unpacked. Nothing else of the footer is looked at: pyarrow 26
    aborts the process where the description of a damaged file's columns contradicts itself.

    Raises:
        DamagedRun: If the file cannot be read, now or while it is open.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # As bytes, since pyarrow opens no text that is not UTF-8. A file of Python's would be let go in
        # a thread of Arrow's, which aborts the process if that comes while Python shuts down.
        name = os.fsencode(copies.local(path))
        with pa.OSFile(name) as file, pq.ParquetFile(file) as part:
            if part.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"{part.metadata.num_rows:,} rows are more than a part can have")
            yield part
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedRun(damaged(path, error)) from error


def _selected(table: pa.Table, kind: Kind, names: Collection[str]) -> pa.Table:
    """The rows of a kind and of some names."""
    from mpdiag.files.arrow_columns import array_of

    keep = _rows_with(table.column("kind"), (kind,)) & _rows_with(table.column("name"), names)
    return table.filter(array_of(keep))  # a copy: a slice would hold the whole table in memory


def _rows_with(column: Any, words: Collection[str]) -> NDArray[Any]:
    """In which rows of a text column one of some words stands."""
    import numpy as np

    from mpdiag.files.arrow_columns import texts

    codes, known = texts(column)
    words = frozenset(words)
    return np.isin(codes, [code for code, word in enumerate(known) if word in words])


def _wanted(path: AnyPath, part: Any, *, histograms: bool) -> list[str]:
    """The columns to read.

    Raises:
        DamagedRun: If the part lacks one.
    """
    from mpdiag.runs.schema import EARLIER, columns_of

    present = set(part.schema_arrow.names)
    expected = columns_of(present)
    missing = [name for name in expected if name not in present]
    if missing:
        raise DamagedRun(
            f"{path} is not a part of a recording (it lacks the column {missing[0]!r}): "
            "move it out of the run folder"
        )
    return [name for name in expected if histograms or name not in (*_HISTOGRAMS, *EARLIER)]


def _as_expected(table: pa.Table) -> pa.Table:
    """The columns in today's order and types; those that were not read are null."""
    import pyarrow as pa

    from mpdiag.runs.schema import schema, upgraded

    expected = schema()
    table = upgraded(table)
    for name in _HISTOGRAMS:
        if name not in table.column_names:
            kind = expected.field(name)
            table = table.append_column(kind, pa.nulls(len(table), kind.type))
    table = table.select(expected.names)
    return table if table.schema.equals(expected) else table.cast(expected)


def damaged(
    path: AnyPath, error: Exception, remedy: str = "remove it to read the rest of the run"
) -> str:
    """The sentence for a file of a run that cannot be read, and what to do about it."""
    detail = str(error).strip().splitlines()
    reason = detail[0] if detail else type(error).__name__
    return f"{path} is damaged ({reason}): {remedy}"


def _decoded(group: Sequence[tuple[AnyPath, pa.Table]]) -> Records:
    """Tables as columns, all at once; only if one of them is damaged is it looked for."""
    import pyarrow as pa

    from mpdiag.runs.records import Records

    try:
        return Records.from_table(pa.concat_tables([table for _, table in group]))
    except ValueError:
        for path, table in group:
            _check(path, table)
        raise


def _check(path: AnyPath, table: pa.Table) -> None:
    from mpdiag.runs.records import Records

    try:
        Records.from_table(table)
    except ValueError as error:
        raise DamagedRun(damaged(path, error)) from error
