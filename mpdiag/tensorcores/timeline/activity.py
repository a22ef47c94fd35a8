"""What a GPU did and when, in order, each piece with the moment the host launched it.

The records of a trace pass through a ``Recording`` on their way to the linker. It keeps what the
timeline needs in buffers on disk, so that a large trace takes no more memory than a small one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from mpdiag.hardware.kernels import classify
from mpdiag.tensorcores.disk_buffer import DiskBuffer
from mpdiag.tensorcores.events import (
    Copy,
    HostOperation,
    HostSpan,
    Kernel,
    Launch,
    host_span_kind,
)
from mpdiag.tensorcores.fixes import is_collective

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mpdiag.tensorcores.events import Event

COPY, COLLECTIVE = "copy", "collective"
"""Kinds of activity besides the verdicts of kernels."""
MOST_SPANS = 200_000
"""Spans of the host that are kept; of a longer trace the rest are left out, which is said."""


_FIRST = frozenset("POe")
"""First letters of the names that ``host_span_kind`` knows."""


class Activity(NamedTuple):
    """A kernel or a copy on the GPU.

    Attributes:
        start_us, end_us: On the GPU.
        launched_us: When the host launched it; NaN where the trace does not tell.
        stream: Its stream.
        kind: A kernel's verdict by name, ``"collective"`` or ``"copy"``.
        name: Of the kernel; "" for a copy.
    """

    start_us: float
    end_us: float
    launched_us: float
    stream: int | str | None
    kind: str
    name: str


class Recording:
    """Keeps what the timeline needs of the records that pass through it.

    Attributes:
        spans: What the host did besides launching, in no order.
        left_out: Whether there were more spans than are kept.
        timed: Whether the trace says when its kernels ran.
    """

    def __init__(self) -> None:
        self.spans: list[HostSpan] = []
        self.left_out = False
        self.timed = True
        self._names: dict[str, int] = {"": 0}
        self._places: dict[tuple[int | str | None, int | str | None], int] = {}
        self._work = DiskBuffer("<qddii")  # correlation, start, end, name, place
        self._launches = DiskBuffer("<qd")
        self._starts: set[float] = set()

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass records on; those that only the timeline needs are kept back."""
        for event in events:
            if isinstance(event, HostOperation):  # most of them are, and there are millions
                if event.name[:1] in _FIRST:  # older traces have the marks among the operations
                    self._marked(event)
            elif isinstance(event, Launch):
                number = event.correlation
                self._launches.add(number, number, number, event.start_us)
            elif isinstance(event, Kernel):
                self._kernel(event)
            elif isinstance(event, HostSpan):
                self._span(event)
                continue
            elif isinstance(event, Copy):
                self._add(event, 0)
                continue
            yield event

    def _marked(self, event: HostOperation) -> None:
        kind = host_span_kind(event.name)
        if kind is not None:
            self._span(HostSpan(kind, event.name, event.start_us, event.end_us))

    def close(self) -> None:
        """Drop everything that was kept."""
        self._work.close()
        self._launches.close()

    def _span(self, span: HostSpan) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.left_out = True

    def _kernel(self, kernel: Kernel) -> None:
        if kernel.calls != 1 or kernel.counters is not None:
            self.timed = False  # a sum of several runs, or a run slowed down to measure it
            return
        if len(self._starts) < 2:
            self._starts.add(kernel.start_us)
        self._add(kernel, self._names.setdefault(kernel.name, len(self._names)))

    def _add(self, work: Kernel | Copy, name: int) -> None:
        place = self._places.setdefault((work.device, work.stream), len(self._places))
        number = -1 if work.correlation is None else work.correlation
        end = work.start_us + work.duration_us
        self._work.add(number, number, number, work.start_us, end, name, place)

    def in_order(self, device: int | str | None) -> Iterator[Activity]:
        """What a device did, by start; nothing where the trace does not say when.

        Args:
            device: As kernels name it.
        """
        if not self.timed or len(self._starts) < 2:
            return
        names, places = list(self._names), list(self._places)
        kinds = ["copy", *(_kind(name) for name in names[1:])]
        joined = DiskBuffer("<dddii")
        try:
            for portion in self._work.portions():
                launched = self._launched({record[0] for record in portion})
                for number, start, end, name, place in portion:
                    if places[place][0] == device:
                        at = launched.get(number, math.nan)
                        joined.add(start, end, start, end, at, name, place)
            for start, end, at, name, place in joined.in_order():
                stream = places[place][1]
                yield Activity(start, end, at, stream, kinds[name], names[name])
        finally:
            joined.close()

    def _launched(self, wanted: set[int]) -> dict[int, float]:
        low, high = min(wanted), max(wanted)
        return {n: at for n, at in self._launches.overlapping(low, high) if n in wanted}


def _kind(name: str) -> str:
    verdict = classify(name).verdict
    return COLLECTIVE if verdict == "other" and is_collective(name) else verdict
