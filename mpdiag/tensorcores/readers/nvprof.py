"""Traces of nvprof: ``--csv --print-gpu-trace``, and its summary, as ``--csv`` or as it prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.events import Event, Kernel, TraceReader
from mpdiag.tensorcores.readers.kernel_table import named_device
from mpdiag.tensorcores.readers.tables import lines, microseconds, number, open_text, rows

_TIME = r"([\d.]+)([mun]?s)"
PRINTED = re.compile(
    rf"^(?: *(GPU activities|API calls):)? +[\d.]+% +{_TIME} +(\d+) +(?:[\d.]+[mun]?s +){{3}}(\S.*)$",
    re.MULTILINE,
)
"""A row of the printed summary: its group, if it begins one, time, unit, calls and name."""


class NvprofTrace(TraceReader):
    """A CSV file of nvprof."""

    source = "nvprof"

    def __init__(self, path: Path, delimiter: str = ",") -> None:
        super().__init__(path)
        self._delimiter = delimiter

    def __iter__(self) -> Iterator[Event]:
        table = rows(self._path, self._delimiter)
        header = next((row for row in table if is_header(row)), None)
        units = next(table, None) if header is not None else None
        if header is None or units is None or len(units) != len(header):
            message = f"{self._path} holds no nvprof table: record with nvprof --csv"
            raise DamagedTrace(message)
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


def is_header(row: Sequence[str]) -> bool:
    """Whether a row is the header of nvprof's table."""
    return "Name" in row and bool(_time_column(row))


def _time_column(header: Sequence[str]) -> str:
    return next((name for name in ("Duration", "Time") if name in header), "")
