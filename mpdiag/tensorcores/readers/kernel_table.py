"""Tables of kernels in CSV: rocprofv3, ``nsys stats``, and any with a kernel's name and its time.

These programs name their columns differently and mean the same: a kernel's name, when it ran or how
long, and perhaps one hardware counter. So one reader knows the names of the columns. In a table with
counters, the runs of one kernel are added up while reading.

nvprof's tables (``--csv --print-gpu-trace``, and its summary, as ``--csv`` or as it prints it) have
readers of their own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Event, Kernel, TraceReader
from mpdiag.tensorcores.readers.tables import lines, microseconds, number, open_text, rows

_UNIT = re.compile(r"[(\[]([^)\]]*)[)\]]\s*$")
_SUFFIX = re.compile(r"\s*(?:\[clone \.kd\]|\(\.kd\)|\.kd)$")
"""What AMD's tools append to a kernel's name: the section of its descriptor."""
FEWEST = 3
"""Columns that a table of kernels has at least: a name, and a time or counter with its place."""
_NAMED_DEVICE = re.compile(r"(\S.{0,200}) \((\d{1,4})\)")
_COPIES = re.compile(r"^\[?(?:CUDA |HIP )?mem(?:cpy|set)\b|^Copy(?:Host|Device)", re.IGNORECASE)
_COLUMNS = {
    "name": ("kernelname", "name", "operation"),
    "spent": ("durationns", "duration", "totaldurationns", "totaltime"),
    "start": ("start",),
    "begin": ("starttimestamp",),
    "end": ("endtimestamp",),
    "calls": ("instances", "calls"),
    "device": ("agentid", "device"),
    "category": ("category",),
    "dispatch": ("dispatchid",),
    "counter": ("countername",),
    "value": ("countervalue",),
}
"""Names of each column in lower case, letters and digits only; of several, the first that is there.

``spent`` is a time, ``begin`` and ``end`` are moments in nanoseconds, ``dispatch`` numbers a run."""
_OLDER = "gpuid"
"""A column of rocprof, rocprofv2 and rocprofiler-compute, whose tables are not read."""


@dataclass(frozen=True)
class KernelColumns:
    """Where a table of kernels has what.

    Attributes:
        source: The program that wrote it.
        width: How many columns it has.
        at: The position of each of ``_COLUMNS`` that it has.
        units: The units of ``spent`` and ``start``.
    """

    source: str
    width: int
    at: Mapping[str, int]
    units: Mapping[str, str]

    @property
    def timed(self) -> bool:
        """Whether it has times."""
        return self.at.keys() >= {"begin", "end"} or bool(self.units.get("spent"))

    def cell(self, row: Sequence[str], column: str) -> str:
        """What a row has in a column; "" where the table lacks it."""
        return row[self.at[column]] if column in self.at else ""

    def time_us(self, row: Sequence[str]) -> float | None:
        """Microseconds of a row, 0 in a table without times; None if they cannot be read."""
        begin, end = number(self.cell(row, "begin")), number(self.cell(row, "end"))
        if begin is not None and end is not None and end >= begin:
            return (end - begin) / 1000
        if self.units.get("spent"):
            return microseconds(self.cell(row, "spent"), self.units["spent"])
        return None if self.timed else 0.0

    def start_us(self, row: Sequence[str]) -> float:
        """When a row's kernel started, in microseconds; 0 where the table does not say."""
        begin = number(self.cell(row, "begin"))
        if begin is not None:
            return begin / 1000
        return microseconds(self.cell(row, "start"), self.units.get("start", "")) or 0.0


def columns(header: Sequence[str]) -> KernelColumns | None:
    """The columns of a table of kernels; None if the row is not the header of one."""
    plain = [re.sub(r"[^a-z0-9]", "", _UNIT.sub("", cell.strip()).lower()) for cell in header]
    if len(header) < FEWEST or _OLDER in plain:
        return None
    present = {
        column: next((plain.index(name) for name in names if name in plain), None)
        for column, names in _COLUMNS.items()
    }
    at = {column: i for column, i in present.items() if i is not None}
    units = {column: _unit(header[i]) for column, i in at.items() if column in ("spent", "start")}
    found = KernelColumns(_source(plain), len(header), at, units)
    return found if _is_of_kernels(found, plain) else None


def _is_of_kernels(found: KernelColumns, plain: Sequence[str]) -> bool:
    """Whether these are columns of kernels, and not of copies or calls."""
    at = found.at
    if "name" not in at:
        return False
    if "kernelname" in plain:
        return found.timed or at.keys() >= {"counter", "value"}
    spent = plain[at.get("spent", 0)]
    summed = "calls" in at and spent in ("totaltime", "totaldurationns")
    traced = spent == "duration" and "corrid" in plain
    copies = plain[at["name"]] == "operation" and "category" not in at  # in nsys stats
    return found.timed and (summed or traced) and not copies


def named_device(cell: str, devices: dict[int, DeviceFacts]) -> int | str:
    """The index of a device that NVIDIA's tables name ``Tesla V100-SXM2-16GB (0)``; keeps its facts."""
    found = _NAMED_DEVICE.fullmatch(cell.strip())
    if found is None:
        return cell
    devices.setdefault(int(found[2]), DeviceFacts(name=found[1]))
    return int(found[2])


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
    """All runs of one kernel, of which each counter may have been measured in runs of its own."""

    device: str | None
    by_counter: dict[str, _CounterSum] = field(default_factory=dict)
    last: tuple[str, str] | None = None

    def add(self, run: tuple[str, str], value: float | None, spent: float) -> None:
        """Add a row: a counter's name and the run's number, the counter's value and the run's time."""
        # A counter with several instances fills several rows of one run.
        again = bool(run[1]) and run == self.last
        self.last = run
        if value is None:
            return
        total = self.by_counter.setdefault(run[0].strip(), _CounterSum())
        total.runs += not again
        total.highest = max(total.highest, value)
        total.spent_us += 0.0 if again else spent

    def kernel(self, name: str) -> Kernel:
        """The kernel, with the time of the counter that was measured longest."""
        spent = max((c.spent_us for c in self.by_counter.values()), default=0.0)
        runs = max((c.runs for c in self.by_counter.values()), default=1)
        values = {counter: total.highest for counter, total in self.by_counter.items()}
        return Kernel(name, 0.0, spent, self.device, calls=max(runs, 1), counters=values)


class KernelTableTrace(TraceReader):
    """A CSV table of kernels."""

    def __init__(self, path: Path, source: str, delimiter: str = ",") -> None:
        super().__init__(path, delimiter)
        self.source = source

    def __iter__(self) -> Iterator[Event]:
        table = rows(self._path, self._delimiter)
        at = next(filter(None, map(columns, table)), None)
        if at is None:
            raise DamagedTrace(f"{self._path} holds no table of kernels: record it again")
        kernels = 0
        counted_rows = at.at.keys() >= {"counter", "value"}
        for kernel in (self._summed if counted_rows else self._single)(table, at):
            kernels += 1
            yield kernel
        if not kernels:
            raise DamagedTrace(f"{self._path} holds the header of a table of kernels but no kernel")
        if not at.timed:
            self.problems.append("the table has no times, so all shares of time are 0")

    def _readable(
        self, table: Iterator[list[str]], at: KernelColumns
    ) -> Iterator[tuple[list[str], str, float]]:
        """Rows of kernels, with name and time in microseconds."""
        lost = 0
        for row in table:
            if len(row) != at.width:
                lost += bool(row)
                continue
            name = _SUFFIX.sub("", at.cell(row, "name").strip())
            of_kernel = "category" not in at.at or "KERNEL" in at.cell(row, "category").upper()
            if not name or _COPIES.match(name) or not of_kernel:
                continue
            spent = at.time_us(row)
            if spent is None:
                lost += 1
                continue
            yield row, name, spent
        if lost:
            self.problems.append(f"left out {counted(lost, 'unreadable row')} of the table")

    def _single(self, table: Iterator[list[str]], at: KernelColumns) -> Iterator[Kernel]:
        for row, name, spent in self._readable(table, at):
            calls = number(at.cell(row, "calls")) or 1
            cell = at.cell(row, "device")
            device = named_device(cell, self.devices) if cell else None
            yield Kernel(name, at.start_us(row), spent, device, calls=int(calls))

    def _summed(self, table: Iterator[list[str]], at: KernelColumns) -> Iterator[Kernel]:
        kernels: dict[str, _KernelSum] = {}
        for row, name, spent in self._readable(table, at):
            if name not in kernels:
                kernels[name] = _KernelSum(at.cell(row, "device") or None)
            run = at.cell(row, "counter"), at.cell(row, "dispatch")
            kernels[name].add(run, number(at.cell(row, "value")), spent)
        for name, found in kernels.items():
            yield found.kernel(name)


_TIME = r"([\d.]+)([mun]?s)"
PRINTED = re.compile(
    rf"^(?: *(GPU activities|API calls):)? +[\d.]+% +{_TIME} +(\d+) +(?:[\d.]+[mun]?s +){{3}}(\S.*)$",
    re.MULTILINE,
)
"""A row of the printed summary: its group, if it begins one, time, unit, calls and name."""


class NvprofTrace(TraceReader):
    """A CSV file of nvprof."""

    source = "nvprof"

    def __iter__(self) -> Iterator[Event]:
        table = rows(self._path, self._delimiter)
        header = next((row for row in table if is_nvprof_header(row)), None)
        units = next(table, None) if header is not None else None
        if header is None or units is None or len(units) != len(header):
            raise DamagedTrace(f"{self._path} holds no nvprof table: record with nvprof --csv")
        at = {name: i for i, name in enumerate(header)}
        spent, name_at = at[_time_column(header)], at["Name"]
        lost = 0
        for row in table:
            if len(row) != len(header):
                lost += bool(row)
                continue
            name = row[name_at]
            if name.startswith(_COPY) or ("Type" in at and row[at["Type"]] != "GPU activities"):
                continue
            duration = microseconds(row[spent], units[spent])
            if duration is None:
                lost += 1
                continue
            start = microseconds(row[at["Start"]], units[at["Start"]]) if "Start" in at else 0.0
            calls = number(row[at["Calls"]]) if "Calls" in at else 1
            # nvprof appends the number of the kernel: "volta_sgemm_64x64_nn [123]"
            plain = name.rpartition(" [")[0] if name.endswith("]") and " [" in name else name
            device = named_device(row[at["Device"]], self.devices) if "Device" in at else None
            yield Kernel(plain, start or 0.0, duration, device, calls=int(calls or 1))
        if lost:
            self.problems.append(f"left out {counted(lost, 'unreadable row')} of the table")


class NvprofSummary(TraceReader):
    """The summary that nvprof prints: the time of each kernel in all."""

    source = "nvprof"

    def __iter__(self) -> Iterator[Event]:
        on_gpu = True
        with open_text(self._path) as text:
            for line in lines(text):
                row = PRINTED.match(line.rstrip())
                if row is None:
                    on_gpu = on_gpu and "API calls:" not in line
                    continue
                group, time, unit, calls, name = row.groups()
                on_gpu = group == "GPU activities" if group else on_gpu
                spent = microseconds(time, unit)
                if on_gpu and spent is not None and not name.startswith(_COPY):
                    yield Kernel(name, 0.0, spent, calls=int(calls))


_COPY = "[CUDA mem"


def is_nvprof_header(row: Sequence[str]) -> bool:
    """Whether a row is the header of nvprof's table."""
    return "Name" in row and bool(_time_column(row))


def _time_column(header: Sequence[str]) -> str:
    return next((name for name in ("Duration", "Time") if name in header), "")
