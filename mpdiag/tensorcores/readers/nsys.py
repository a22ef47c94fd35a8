"""Exports of Nsight Systems: ``nsys export --type sqlite``. Opened for reading only."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Copy, Event, HostSpan, Kernel, Launch, TraceReader

LONGEST = 1 << 24
"""The longest value, in bytes; anything longer counts as damaged."""
_ROCPD = "rocpd_"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"}
# Each id only once: repeated ids would multiply the rows they are joined to.
_NAMES = "(SELECT id, value FROM StringIds GROUP BY id)"


class NsysTrace(TraceReader):
    """An sqlite export of nsys."""

    source = "nsys"

    def __iter__(self) -> Iterator[Event]:
        try:
            with _opened(self._path) as base:
                yield from self._read(base)
        except (sqlite3.Error, UnicodeError) as error:
            message = f"{self._path} cannot be read as an nsys export ({error}): export it again"
            raise DamagedTrace(message) from error

    def _read(self, base: sqlite3.Connection) -> Iterator[Event]:
        tables = _tables_of(base)
        if any(table.startswith(_ROCPD) for table in tables):
            raise DamagedTrace(
                f"{self._path} is a database of rocprofv3 (rocpd), which is not read: record with "
                "rocprofv3 --kernel-trace --output-format csv, or convert it with rocpd2csv"
            )
        if _KERNELS not in tables or "StringIds" not in tables:
            raise DamagedTrace(
                f"{self._path} holds no kernels: record with nsys profile --trace=cuda, "
                "then nsys export --type sqlite"
            )
        self.devices = _devices(base, tables)
        self.tensor_active = _tensor_active(base, tables)
        columns = _columns_of(base, _KERNELS)
        node = "k.graphNodeId" if "graphNodeId" in columns else "NULL"
        # shortName lacks the template arguments, which say what ran.
        query = (  # our own words alone
            f"SELECT s.value, k.start, k.end, k.deviceId, k.streamId, k.correlationId, {node} "  # noqa: S608
            f"FROM {_KERNELS} k LEFT JOIN {_NAMES} s ON s.id = k.demangledName"
        )
        lost = 0
        for name, start, end, device, stream, correlation, graph in base.execute(query):
            if not isinstance(start, int) or not isinstance(end, int) or end < start:
                lost += 1
                continue
            shown = name if isinstance(name, str) else "(unnamed kernel)"
            span = (end - start) / 1000
            yield Kernel(
                shown,
                start / 1000,
                span,
                _label(device),
                _label(stream),
                _whole(correlation),
                _whole(graph),
            )
        if lost:
            self.problems.append(f"left out {counted(lost, 'kernel')} without times")
        for table in sorted(_COPIES & tables):
            yield from _copies(base, table)
        if _RUNTIME in tables:
            yield from _launches(base)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A database for reading only, of which no code runs.

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


def _tables_of(base: sqlite3.Connection) -> set[str]:
    """Real tables only: reading a view or a virtual table may never end."""
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND sql LIKE 'CREATE TABLE%' AND rootpage > 0"
    )
    return {name for (name,) in base.execute(query)}


def _columns_of(base: sqlite3.Connection, table: str) -> set[str]:
    """The columns of a table whose name is one of ours."""
    return {row[1] for row in base.execute(f"PRAGMA table_info({table})")}


def _copies(base: sqlite3.Connection, table: str) -> Iterator[Copy]:
    if not {"start", "end", "deviceId", "streamId", "correlationId"} <= _columns_of(base, table):
        return
    query = f"SELECT start, end, deviceId, streamId, correlationId FROM {table}"  # noqa: S608 - ours
    for start, end, device, stream, correlation in base.execute(query):
        if isinstance(start, int) and isinstance(end, int) and end >= start:
            span, number = (end - start) / 1000, _whole(correlation)
            yield Copy(start / 1000, span, _label(device), _label(stream), number)


def _launches(base: sqlite3.Connection) -> Iterator[Launch | HostSpan]:
    """Calls that start work on the GPU, and calls that wait for it."""
    query = (  # our own words alone
        "SELECT r.correlationId, r.start, r.end, r.globalTid, s.value "  # noqa: S608
        f"FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN {_NAMES} s ON s.id = r.nameId "
        "WHERE s.value LIKE '%aunch%' OR s.value LIKE '%ynchronize%' OR s.value LIKE '%Memcpy%' "
        "OR s.value LIKE '%Memset%'"
    )
    for correlation, start, end, thread, name in base.execute(query):
        if not isinstance(start, int):
            continue
        if "ynchronize" in str(name):
            until = end / 1000 if isinstance(end, int) else start / 1000
            yield HostSpan("wait", str(name).partition("_v")[0], start / 1000, until)
        elif isinstance(correlation, int):
            place = (None, _label(thread))
            yield Launch(correlation, start / 1000, place, "GraphLaunch" in str(name))


def _label(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _devices(base: sqlite3.Connection, tables: set[str]) -> dict[int, DeviceFacts]:
    if "TARGET_INFO_GPU" not in tables:
        return {}
    known = _columns_of(base, "TARGET_INFO_GPU")

    wanted = ("id", "name", "computeMajor", "computeMinor", "smCount", "totalMemory")
    fields = ", ".join(name if name in known else "NULL" for name in wanted)
    found: dict[int, DeviceFacts] = {}
    for row in base.execute(f"SELECT {fields} FROM TARGET_INFO_GPU"):  # noqa: S608 - our own words
        index, name, major, minor, processors, memory = row
        whole = isinstance(major, int) and isinstance(minor, int)
        found[index if isinstance(index, int) else len(found)] = DeviceFacts(
            name=str(name or ""),
            capability=(major, minor) if whole else None,
            processors=processors if isinstance(processors, int) else None,
            memory_bytes=memory if isinstance(memory, int) else None,
        )
    return found


def _tensor_active(base: sqlite3.Connection, tables: set[str]) -> float | None:
    """Mean sampled activity of the Tensor pipe, as a share; None if it was not sampled."""
    if not {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} <= tables:
        return None
    row: Any = base.execute(
        "SELECT AVG(value) FROM GPU_METRICS WHERE (typeId, metricId) IN "
        "(SELECT typeId, metricId FROM TARGET_INFO_GPU_METRICS "
        "WHERE metricName LIKE '%Tensor%Active%')"
    ).fetchone()
    mean = row[0] if row is not None else None
    return mean / 100 if isinstance(mean, float) and 0 <= mean <= 100 else None
