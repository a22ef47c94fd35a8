"""Counters that Nsight Compute printed: the output of ``ncu`` or ``ncu --import FILE --page details``.

Each kernel has a heading and tables of metrics, whose columns stand below a ruler of dashes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Event, Kernel
from mpdiag.tensorcores.readers.formats.tables import lines, microseconds, number, open_text
from mpdiag.tensorcores.readers.ncu import DURATIONS, HERTZ

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADING = re.compile(
    r"^ {2}(?P<name>\S.*?)(?: \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\))?,(?: \d{4}-\w{3}-\d\d [\d:]+,)? "
    r"Context \d+, Stream \d+(?:, Device (?P<device>\d+), CC (?P<major>\d+)\.(?P<minor>\d+))?\s*$",
    re.MULTILINE,
)
_RULER = re.compile(r"^ {4}-+(?: -+){2}\s*$")
_COLUMNS = re.compile(r"-+")


class NcuTextTrace:
    """The printed output of ncu; see ``events.TraceReader``."""

    source = "ncu"
    tensor_active: float | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self.devices: dict[int, DeviceFacts] = {}
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Event]:
        name, duration = "", 0.0
        counters: dict[str, float] = {}
        spans: list[tuple[int, int]] = []
        found = 0
        with open_text(self._path) as text:
            for line in lines(text):
                heading = HEADING.match(line)
                if heading:
                    if name:
                        yield Kernel(name, 0.0, duration, counters=counters)
                    found += 1
                    name, duration, counters = heading["name"], 0.0, {}
                    self._device(heading)
                elif _RULER.match(line):
                    spans = [match.span() for match in _COLUMNS.finditer(line)]
                elif name and line.startswith("    ") and len(spans) == 3:
                    metric, unit, value = (line[a:b].strip() for a, b in spans)
                    if metric in DURATIONS:
                        duration = microseconds(value, unit) or duration
                    elif (plain := number(value)) is not None and metric:
                        counters[metric] = plain * HERTZ.get(unit.lower(), 1.0)
        if name:
            yield Kernel(name, 0.0, duration, counters=counters)
        if not found:
            message = f"{self._path} holds no kernel measured by ncu: record with ncu --csv"
            raise DamagedTrace(message)

    def _device(self, heading: re.Match[str]) -> None:
        if heading["major"] and not self.devices:
            capability = int(heading["major"]), int(heading["minor"])
            self.devices[0] = DeviceFacts(name="", capability=capability)
