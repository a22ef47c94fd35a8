"""Counters of Nsight Compute: ``ncu --csv``, one row for each metric of each kernel.

Also ``ncu --csv --page raw``, with a column for each metric and a row of units.
"""

from collections.abc import Iterator, Sequence

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Event, Kernel, TraceReader
from mpdiag.tensorcores.readers.tables import microseconds, number, rows

_DURATIONS = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
_HEAD = ("ID", "Kernel Name")
_LONG = {"Metric Name", "Metric Unit", "Metric Value"}
_HERTZ = {"khz": 1e3, "mhz": 1e6, "ghz": 1e9, "cycle/nsecond": 1e9, "cycle/usecond": 1e6}
_HERTZ |= {"cycle/ns": 1e9, "cycle/us": 1e6, "cycle/second": 1.0}


class NcuTrace(TraceReader):
    """A CSV file of ncu."""

    source = "ncu"

    def __iter__(self) -> Iterator[Event]:
        table = rows(self._path, self._delimiter)
        header, flops = None, list[float]()
        for row in table:
            if is_header(row):
                header = row
                break
            flops += _flops_said(row)
        if header is None:
            raise DamagedTrace(f"{self._path} holds no ncu table: record with ncu --csv")
        kernels = self._long if "Metric Name" in header else self._wide
        found = list(kernels(header, table))
        if not found:
            raise DamagedTrace(f"{self._path} holds an ncu header but no kernel: record it again")
        if len(found) == len(flops) == 1:
            found = [found[0]._replace(flops=flops[0])]
        yield from found

    def _long(self, header: Sequence[str], table: Iterator[list[str]]) -> Iterator[Kernel]:
        at = {name: i for i, name in enumerate(header)}
        current, name, counters = "", "", dict[str, float]()
        duration, short = 0.0, 0
        for row in table:
            if len(row) < len(header) - 5 or len(row) <= at["Metric Value"]:
                short += bool(row)
                continue
            if row[at["ID"]] != current:
                if current:
                    yield Kernel(name, 0.0, duration, counters=counters)
                current, name, counters, duration = row[at["ID"]], row[at["Kernel Name"]], {}, 0.0
                self._device(row, at)
            metric, unit, text = (row[at[f"Metric {x}"]] for x in ("Name", "Unit", "Value"))
            value = number(text)
            if metric in _DURATIONS:
                duration = microseconds(text, unit) or duration
            elif metric and value is not None:
                counters[metric] = value * _HERTZ.get(unit.lower(), 1.0)
        if current:
            yield Kernel(name, 0.0, duration, counters=counters)
        if short:
            self.problems.append(f"left out {counted(short, 'incomplete row')} of the table")

    def _wide(self, header: Sequence[str], table: Iterator[list[str]]) -> Iterator[Kernel]:
        at = {name: i for i, name in enumerate(header)}
        units = next(table, [])
        for row in table:
            if len(row) != len(header):
                continue
            self._device(row, at)
            counters, duration = dict[str, float](), 0.0
            for i, metric in enumerate(header):
                value = number(row[i])
                if metric in _DURATIONS:
                    duration = microseconds(row[i], units[i] if i < len(units) else "") or 0.0
                elif "__" in metric and value is not None:
                    counters[metric] = value
            yield Kernel(row[at["Kernel Name"]], 0.0, duration, counters=counters)

    def _device(self, row: Sequence[str], at: dict[str, int]) -> None:
        if "CC" not in at or self.devices:
            return
        major, _, minor = row[at["CC"]].partition(".")
        if major.isdigit() and minor.isdigit():
            self.devices[0] = DeviceFacts(name="", capability=(int(major), int(minor)))


def is_header(row: Sequence[str]) -> bool:
    """Whether a row is the header of ncu's table."""
    return all(name in row for name in _HEAD) and ("Metric Name" not in row or set(row) >= _LONG)


def _flops_said(row: Sequence[str]) -> list[float]:
    """FLOP of a matrix product that the program itself printed: ``M N K batch µs TFLOP/s``.

    Accepted only if the line is consistent: its rate must equal its work divided by its time.
    """
    words = " ".join(row).split()
    if len(words) != 6:
        return []
    numbers = [number(word) for word in words]
    m, n, k, batch, spent, rate = (0.0 if value is None else value for value in numbers)
    work = 2 * m * n * k * max(1.0, batch)
    possible = 0 < work < float("inf") and spent > 0 and rate > 0  # not NaN, either
    if not possible or abs(work / spent / 1e6 / rate - 1) > 1e-3:
        return []
    return [work]
