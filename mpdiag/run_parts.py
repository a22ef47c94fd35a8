"""Reading the parts of statistics: in order, and small ones a few at a time.

A long training leaves hundreds of small parts, of which opening one costs more than reading it, and
so does making columns of it. Small parts are therefore opened side by side, and decoded together;
a large part is read some rows at a time, for Arrow needs several times their size meanwhile.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedRun
from mpdiag.places import is_remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import pyarrow as pa

    from mpdiag.columns import Records

BATCH_ROWS = 16_384
"""Rows of a large part read at a time."""
SMALL = 1 << 20
"""Bytes of a file up to which a part is small."""
TOGETHER = 4 << 20
"""Bytes of small parts decoded together: some 50,000 rows of a usual recording."""
READERS = 2
_HISTOGRAMS = ("counts", "means", "ratio_counts")


def records_of(paths: Iterable[Path], *, histograms: bool = True) -> Iterator[Records]:
    """The rows of some parts as columns, some at a time, in order.

    Args:
        paths: The parts.
        histograms: False leaves the bins empty, and is several times faster.

    Raises:
        DamagedRun: If one cannot be read, lacks a column or holds nonsense.
    """
    import pyarrow as pa

    from mpdiag.columns import Records

    with ThreadPoolExecutor(READERS) as pool:
        for group, waiting in _ahead(pool, _groups(paths), histograms=histograms):
            if not waiting:
                for table in tables_of(group[0], histograms=histograms):
                    yield _decoded(group[0], table)
                continue
            tables = [table for future in waiting for table in future.result()]
            if not tables:
                continue
            try:
                yield Records.from_table(pa.concat_tables(tables))
            except ValueError:
                for path in group:  # which of them is it?
                    for table in tables_of(path, histograms=histograms):
                        _decoded(path, table)
                raise


def tables_of(path: Path, *, histograms: bool = True) -> Iterator[pa.Table]:
    """A part's rows as Arrow tables, some at a time.

    Raises:
        DamagedRun: If it cannot be read or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mpdiag.records import schema

    expected = schema()
    try:
        with source_of(path) as source, pq.ParquetFile(source) as part:
            missing = [name for name in expected.names if name not in part.schema_arrow.names]
            if missing:
                message = (
                    f"{path} is not a part of a recording (it lacks the column {missing[0]!r}): "
                    "move it out of the run folder"
                )
                raise DamagedRun(message)
            wanted = [n for n in expected.names if histograms or n not in _HISTOGRAMS]
            for batch in part.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
                table = pa.table(batch)
                for name in expected.names:
                    if name not in wanted:
                        table = table.append_column(
                            expected.field(name), pa.nulls(len(table), expected.field(name).type)
                        )
                yield table.select(expected.names).cast(expected)
        pa.default_memory_pool().release_unused()  # some 60 MB otherwise stay with it
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedRun(damaged(path, error)) from error


def rows_in(path: Path) -> int:
    """How many rows a part has, by its footer.

    Raises:
        DamagedRun: If it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source_of(path) as source, pq.ParquetFile(source) as part:
            return int(part.metadata.num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedRun(damaged(path, error)) from error


def source_of(path: Path) -> AbstractContextManager[Any]:
    """What Arrow reads: a local path itself, which it maps, or an opened remote file."""
    return path.open("rb") if is_remote(path) else nullcontext(path)


def damaged(path: Path, error: Exception) -> str:
    """The sentence for a file of a run that cannot be read."""
    detail = str(error).strip().splitlines()
    reason = detail[0] if detail else type(error).__name__
    return f"{path} is damaged ({reason}): remove it to read the rest of the run"


# -- several at a time -----------------------------------------------------------------------------


def _groups(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Neighbouring small parts together; a large part, and a remote one, by itself."""
    group: list[Path] = []
    together = 0
    for path in paths:
        size = _size(path)
        if group and (size > SMALL or together + size > TOGETHER):
            yield group
            group, together = [], 0
        group.append(path)
        together += size
        if size > SMALL:
            yield group
            group, together = [], 0
    if group:
        yield group


def _size(path: Path) -> int:
    if is_remote(path):
        return SMALL + 1
    try:
        return path.stat().st_size
    except OSError:  # reading it says what is wrong
        return SMALL + 1


def _ahead(
    pool: ThreadPoolExecutor, groups: Iterable[Sequence[Path]], *, histograms: bool
) -> Iterator[tuple[Sequence[Path], list[Future[list[pa.Table]]]]]:
    """Each group with its tables, the next being read while one is used; none of a large part."""

    def whole(path: Path) -> list[pa.Table]:
        return list(tables_of(path, histograms=histograms))

    started: deque[tuple[Sequence[Path], list[Future[list[pa.Table]]]]] = deque()
    for group in groups:
        small = len(group) > 1 or _size(group[0]) <= SMALL
        started.append((group, [pool.submit(whole, path) for path in group] if small else []))
        if len(started) > 1:
            yield started.popleft()
    yield from chain(started)


def _decoded(path: Path, table: pa.Table) -> Records:
    from mpdiag.columns import Records

    try:
        return Records.from_table(table)
    except ValueError as error:
        raise DamagedRun(damaged(path, error)) from error
