"""Tables of kernels in CSV: rocprofv3, ``nsys stats``, and any with a kernel's name and its time.

These programs name their columns differently and mean the same: a kernel's name, when it ran or how
long, and perhaps one hardware counter. So one reader knows the names of the columns. In a table with
counters, the runs of one kernel are added up while reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Event, Kernel, TraceReader
from mpdiag.tensorcores.readers.tables import microseconds, number, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_UNIT = re.compile(r"[(\[]([^)\]]*)[)\]]\s*$")
_SUFFIX = re.compile(r"\s*(?:\[clone \.kd\]|\(\.kd\)|\.kd)$")
"""What AMD's tools append to a kernel's name: the section of its descriptor."""
FEWEST = 3
"""Columns that a table of kernels has at least: a name, and a time or counter with its place."""
_NAMED_DEVICE = re.compile(r"(\S.{0,200}) \((\d{1,4})\)")
_COPIES = re.compile(r"^\[?(?:CUDA |HIP )?mem(?:cpy|set)\b|^Copy(?:Host|Device)", re.IGNORECASE)

# The names of columns in lower case, letters and digits only; of several, the first that is there.
_NAME = ("kernelname", "name", "operation")
_SPENT = ("durationns", "duration", "totaldurationns", "totaltime")
_BEGIN = ("starttimestamp",)
_END = ("endtimestamp",)
_CALLS = ("instances", "calls")
_DEVICE = ("agentid", "device")
_DISPATCH = ("dispatchid",)
_OLDER = "gpuid"
"""A column of rocprof, rocprofv2 and rocprofiler-compute, whose tables are not read."""


@dataclass(frozen=True)
class KernelColumns:
    """Where a table has what; positions are None for columns that it lacks.

    Attributes:
        source: The program that wrote it.
        name, device, calls: The kernel, its device, and the number of runs in one row.
        spent, unit: Its time, and the unit of that.
        start, start_unit: When it started, beside its time.
        begin, end: Start and end in nanoseconds, instead.
        category: Whether the row is a kernel at all.
        dispatch: The number of the run.
        counter, value: A counter's name and value, in tables with one counter a row.
    """

    source: str
    name: int
    device: int | None
    calls: int | None
    spent: int | None
    unit: str
    start: int | None
    start_unit: str
    begin: int | None
    end: int | None
    category: int | None
    dispatch: int | None
    counter: int | None
    value: int | None


def columns(header: Sequence[str]) -> KernelColumns | None:
    """The columns of a table of kernels; None if the row is not the header of one."""
    if len(header) < FEWEST:
        return None
    plain = [_plain(cell) for cell in header]
    if _OLDER in plain:
        return None

    def find(names: Sequence[str]) -> int | None:
        return next((plain.index(n) for n in names if n in plain), None)

    name, spent, begin, end = (find(n) for n in (_NAME, _SPENT, _BEGIN, _END))
    start = find(("start",))
    calls, counter, value = find(_CALLS), find(("countername",)), find(("countervalue",))
    of_kernels = "kernelname" in plain
    unit = "" if spent is None else _unit(header[spent])
    timed = (begin is not None and end is not None) or (spent is not None and bool(unit))
    with_counters = counter is not None and value is not None
    if name is None or not (timed or (of_kernels and with_counters)):
        return None
    category = find(("category",))
    summed = calls is not None and plain[spent or 0] in ("totaltime", "totaldurationns")
    traced = plain[spent or 0] == "duration" and "corrid" in plain
    if not of_kernels and not (summed or traced):
        return None
    if plain[name] == "operation" and category is None:  # copies, in nsys stats
        return None
    return KernelColumns(
        source=_source(plain),
        name=name,
        device=find(_DEVICE),
        calls=calls,
        spent=spent if timed else None,
        unit=unit,
        start=start,
        start_unit="" if start is None else _unit(header[start]),
        begin=begin,
        end=end,
        category=category,
        dispatch=find(_DISPATCH),
        counter=counter,
        value=value,
    )


def named_device(cell: str, devices: dict[int, DeviceFacts]) -> int | str:
    """A device as NVIDIA's tables name it, ``Tesla V100-SXM2-16GB (0)``: its index, and its facts kept.

    Args:
        cell: What the table says.
        devices: Where its facts are kept.
    """
    found = _NAMED_DEVICE.fullmatch(cell.strip())
    if found is None:
        return cell
    devices.setdefault(int(found[2]), DeviceFacts(name=found[1]))
    return int(found[2])


def _plain(cell: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _UNIT.sub("", cell.strip()).lower())


def _unit(cell: str) -> str:
    """The unit that a column's name ends in: ``Total Time (ns)``, ``DurationNs``."""
    found = _UNIT.search(cell.strip())
    if found:
        return found[1]
    return "ns" if cell.strip().endswith(("Ns", "NS", "_ns")) else ""


def _source(plain: Sequence[str]) -> str:
    names = set(plain)
    if "correlationid" in names and names & {"agentid", "countername"}:
        return "rocprofv3"
    if "totaldurationns" in names or "kernelname" in names:
        return "rocprof"
    return "nsys stats"


@dataclass
class _CounterSum:
    """One counter of one kernel."""

    runs: int = 0
    highest: float = 0.0
    spent_us: float = 0.0


@dataclass
class _KernelSum:
    """All runs of one kernel in a table with counters."""

    device: str | None
    by_counter: dict[str, _CounterSum] = field(default_factory=dict)
    last: tuple[str, str] | None = None


class KernelTableTrace(TraceReader):
    """A CSV table of kernels."""

    def __init__(self, path: Path, source: str, delimiter: str = ",") -> None:
        super().__init__(path)
        self.source = source
        self._delimiter = delimiter
        self._lost = 0

    def __iter__(self) -> Iterator[Event]:
        table = rows(self._path, self._delimiter)
        at, width = None, 0
        for row in table:
            at, width = columns(row), len(row)
            if at is not None:
                break
        if at is None:
            message = f"{self._path} holds no table of kernels: record it again"
            raise DamagedTrace(message)
        self._lost = found = 0
        read = self._plain if at.counter is None else self._summed
        for kernel in read(table, at, width):
            found += 1
            yield kernel
        if self._lost:
            self.problems.append(f"left out {counted(self._lost, 'unreadable row')} of the table")
        if not found:
            message = f"{self._path} holds the header of a table of kernels but no kernel"
            raise DamagedTrace(message)
        if at.spent is None and at.begin is None:
            self.problems.append("the table has no times, so all shares of time are 0")

    def _good(
        self, table: Iterator[list[str]], at: KernelColumns, width: int
    ) -> Iterator[tuple[list[str], str, float]]:
        """Rows of kernels, with name and time in microseconds."""
        timed = at.spent is not None or (at.begin is not None and at.end is not None)
        for row in table:
            if len(row) != width:
                self._lost += bool(row)
                continue
            name = _SUFFIX.sub("", row[at.name].strip())
            if not name or _COPIES.match(name):
                continue
            if at.category is not None and "KERNEL" not in row[at.category].upper():
                continue
            spent = _spent(row, at) if timed else 0.0
            if spent is None:
                self._lost += 1
                continue
            yield row, name, spent

    def _plain(self, table: Iterator[list[str]], at: KernelColumns, width: int) -> Iterator[Kernel]:
        for row, name, spent in self._good(table, at, width):
            calls = 1 if at.calls is None else number(row[at.calls])
            device = None if at.device is None else named_device(row[at.device], self.devices)
            yield Kernel(name, _start(row, at), spent, device, calls=int(calls or 1))

    def _summed(
        self, table: Iterator[list[str]], at: KernelColumns, width: int
    ) -> Iterator[Kernel]:
        assert at.counter is not None
        assert at.value is not None
        kernels: dict[str, _KernelSum] = {}
        for row, name, spent in self._good(table, at, width):
            found = kernels.get(name)
            if found is None:
                found = kernels[name] = _KernelSum(None if at.device is None else row[at.device])
            run = (row[at.counter], "" if at.dispatch is None else row[at.dispatch])
            # A counter with several instances fills several rows of one run.
            again = bool(run[1]) and run == found.last
            self._count(found, run[0].strip(), row[at.value], 0.0 if again else spent, again=again)
            found.last = run
        for name, found in kernels.items():
            yield _kernel(name, found)

    @staticmethod
    def _count(
        found: _KernelSum, counter: str, text: str, spent: float, *, again: bool = False
    ) -> None:
        value = number(text)
        if value is None:
            return
        total = found.by_counter.setdefault(counter, _CounterSum())
        total.runs += not again
        total.highest = max(total.highest, value)
        total.spent_us += spent


def _spent(row: Sequence[str], at: KernelColumns) -> float | None:
    """Microseconds of a row; None if it has none."""
    if at.begin is not None and at.end is not None:
        begin, end = number(row[at.begin]), number(row[at.end])
        if begin is not None and end is not None and end >= begin:
            return (end - begin) / 1000
    if at.spent is None:
        return None
    return microseconds(row[at.spent], at.unit)


def _start(row: Sequence[str], at: KernelColumns) -> float:
    """When a row's kernel started, in microseconds; 0 where the table does not say."""
    if at.begin is not None:
        begin = number(row[at.begin])
        return 0.0 if begin is None else begin / 1000
    found = None if at.start is None else microseconds(row[at.start], at.start_unit)
    return found or 0.0


def _kernel(name: str, found: _KernelSum) -> Kernel:
    """All runs of a kernel: each counter may have been measured in runs of its own, with their times."""
    most = max(found.by_counter.values(), key=lambda c: c.spent_us, default=_CounterSum())
    runs = max((c.runs for c in found.by_counter.values()), default=1)
    values = {counter: total.highest for counter, total in found.by_counter.items()}
    return Kernel(name, 0.0, most.spent_us, found.device, calls=max(runs, 1), counters=values)
