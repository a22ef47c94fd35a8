"""Databases of rocprofv3: ``rocpd``, its default output since ROCm 7. Opened for reading only.

Each process has tables of its own, whose names end in its number. Times and counters are added up by
the database.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.events import Event, Kernel
from mpdiag.tensorcores.readers.formats.sqlite_file import columns_of, opened, quoted, tables_of
from mpdiag.tensorcores.readers.rocprof_json import amd_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpdiag.hardware.devices import DeviceFacts

DISPATCH = "rocpd_kernel_dispatch"


class RocpdTrace:
    """A database of rocprofv3; see ``events.TraceReader``."""

    source = "rocprofv3"
    tensor_active: float | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self.devices: dict[int, DeviceFacts] = {}
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Event]:
        try:
            with opened(self._path) as base:
                found = list(self._read(base))
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            message = f"{self._path} cannot be read as a database of rocprofv3 ({error})"
            raise DamagedTrace(message) from error
        if not found:
            message = f"{self._path} holds no kernels: record with rocprofv3 --kernel-trace"
            raise DamagedTrace(message)
        yield from found

    def _read(self, base: sqlite3.Connection) -> Iterator[Kernel]:
        tables = tables_of(base)
        for table in sorted(tables):
            if not table.startswith(DISPATCH):
                continue
            process = table[len(DISPATCH) :]
            if f"rocpd_info_kernel_symbol{process}" not in tables:
                continue
            agents = self._agents(base, tables, process)
            yield from self._kernels(base, tables, process, agents)

    def _agents(self, base: sqlite3.Connection, tables: set[str], process: str) -> dict[Any, int]:
        """The GPUs of one process: their index by their number in the database."""
        table = f"rocpd_info_agent{process}"
        known = columns_of(base, table) if table in tables else set()
        if not {"id", "name"} <= known:
            return {}
        product = next((n for n in ("product_name", "user_name") if n in known), "NULL")
        kind = "type" if "type" in known else "'GPU'"
        query = f"SELECT id, name, {product} FROM {quoted(table)} WHERE {kind} = 'GPU'"  # noqa: S608
        indices: dict[Any, int] = {}
        for number, name, shown in base.execute(query):
            indices[number] = len(self.devices)
            self.devices[len(self.devices)] = amd_device(name, shown, None)
        return indices

    def _kernels(
        self, base: sqlite3.Connection, tables: set[str], process: str, agents: dict[Any, int]
    ) -> Iterator[Kernel]:
        dispatch, symbol = quoted(DISPATCH + process), quoted(f"rocpd_info_kernel_symbol{process}")
        measured = _measured(base, tables, process)
        query = (  # our own words, and names that are quoted
            "SELECT k.kernel_id, k.agent_id, COALESCE(s.display_name, s.kernel_name), COUNT(*), "  # noqa: S608
            'SUM(k."end" - k.start), SUM(k."end" < k.start OR typeof(k."end" - k.start) != \'integer\') '
            # Each id only once: repeated ids would multiply the rows they are joined to.
            f"FROM {dispatch} k LEFT JOIN (SELECT id, display_name, kernel_name FROM {symbol} "
            "GROUP BY id) s ON s.id = k.kernel_id "
            "GROUP BY k.kernel_id, k.agent_id"
        )
        for kernel, agent, name, calls, spent, wrong in base.execute(query):
            if wrong or not isinstance(spent, int):
                self.problems.append(f"left out {counted(calls, 'run')} of a kernel, without times")
                continue
            shown = name.removesuffix(".kd") if isinstance(name, str) else f"(kernel {kernel})"
            counters = measured.get((kernel, agent))
            device = agents.get(agent)
            yield Kernel(shown, 0.0, spent / 1000, device, calls=calls, counters=counters)


def _measured(
    base: sqlite3.Connection, tables: set[str], process: str
) -> dict[tuple[Any, Any], dict[str, float]]:
    """The highest value of each counter in one run, by kernel and GPU."""
    events, names = f"rocpd_pmc_event{process}", f"rocpd_info_pmc{process}"
    if not {events, names} <= tables or "event_id" not in columns_of(base, DISPATCH + process):
        return {}
    query = (  # our own words, and names that are quoted
        "SELECT kernel_id, agent_id, name, MAX(total) FROM ("  # noqa: S608
        "SELECT k.kernel_id, k.agent_id, p.name, SUM(v.value) AS total "
        f"FROM (SELECT kernel_id, agent_id, event_id FROM {quoted(DISPATCH + process)} "
        f"GROUP BY event_id) k JOIN {quoted(events)} v ON v.event_id = k.event_id "
        f"JOIN (SELECT id, name FROM {quoted(names)} GROUP BY id) p ON p.id = v.pmc_id "
        "GROUP BY k.event_id, p.name) "
        "GROUP BY kernel_id, agent_id, name"
    )
    found: dict[tuple[Any, Any], dict[str, float]] = {}
    for kernel, agent, name, value in base.execute(query):
        if isinstance(value, int | float):
            found.setdefault((kernel, agent), {})[str(name)] = float(value)
    return found
