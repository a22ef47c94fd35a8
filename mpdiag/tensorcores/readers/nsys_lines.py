"""Exports of Nsight Systems in lines: ``nsys export --type jsonlines``.

Each line is an object. The first ones hold the strings that later ones refer to by number; a kernel is a
``CudaEvent`` with a ``kernel``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.events import Event, Kernel
from mpdiag.tensorcores.readers.formats.tables import lines, open_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpdiag.hardware.devices import DeviceFacts

_NAMES = ("demangledName", "shortName")
LONGEST = 1 << 26
"""The longest line, in characters: the table of strings is one line."""


class NsysLinesTrace:
    """A jsonlines export of nsys; see ``events.TraceReader``."""

    source = "nsys"
    tensor_active: float | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self.devices: dict[int, DeviceFacts] = {}
        self.problems: list[str] = []
        self._strings: list[Any] = []

    def __iter__(self) -> Iterator[Event]:
        lost = found = 0
        with open_text(self._path) as text:
            for line in lines(text, LONGEST):
                if '"kernel"' not in line and '"data"' not in line:
                    continue
                try:
                    event = self._event(json.loads(line))
                except (
                    ValueError,
                    TypeError,
                    KeyError,
                    AttributeError,
                    IndexError,
                    OverflowError,
                    RecursionError,
                ):
                    lost += 1
                    continue
                if event is not None:
                    found += 1
                    yield event
        if lost:
            self.problems.append(f"left out {counted(lost, 'damaged line')} of the export")
        if not found:
            message = (
                f"{self._path} holds no kernels: record with nsys profile --trace=cuda, then "
                "nsys export --type sqlite"
            )
            raise DamagedTrace(message)

    def _event(self, raw: Any) -> Kernel | None:
        if isinstance(raw.get("data"), list) and "CudaEvent" not in raw:
            self._strings = self._strings or raw["data"]
            return None
        cuda = raw.get("CudaEvent")
        if cuda is None or "kernel" not in cuda:
            return None
        start, end = int(cuda["startNs"]), int(cuda["endNs"])
        if end < start:
            raise ValueError
        numbers = [int(cuda["kernel"][n]) for n in _NAMES if n in cuda["kernel"]]
        number = numbers[0]
        name = self._strings[number] if 0 <= number < len(self._strings) else None
        shown = name if isinstance(name, str) else "(unnamed kernel)"
        device, stream = (_number(cuda.get(name)) for name in ("deviceId", "streamId"))
        return Kernel(shown, start / 1000, (end - start) / 1000, device, stream)


def _number(said: Any) -> int | None:
    """A number that may be missing; raises what ``int`` does for anything else."""
    return None if said is None else int(said)
