"""What a GPU did and when: all of it in order of time, or the longest pieces of some steps.

The timeline's sweep takes the first and keeps sums alone. A drawing of a step takes the second, which
reads the trace again, so that a trace of any length takes no more memory than ``MOST`` pieces a window.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mpdiag.tensorcores.causes import is_collective
from mpdiag.tensorcores.collected import DiskBuffer
from mpdiag.tensorcores.events import Copy, Kernel
from mpdiag.tensorcores.kernels.classification import classify
from mpdiag.tensorcores.readers.recognition import read

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from mpdiag.tensorcores.collected import Collected
    from mpdiag.tensorcores.timeline.sweep import Timeline, Window


COPY, COLLECTIVE = "copy", "collective"
"""Kinds of activity besides the verdicts of kernels."""


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


def activities(trace: Collected, device: int | str | None) -> Iterator[Activity]:
    """What a device did, by start; nothing where the trace does not say when.

    Args:
        trace: All of it.
        device: As kernels name it.
    """
    if not trace.timed:
        return
    names, places = trace.names.values, trace.places.values
    kinds = [COPY, *(_kind(name) for name in names[1:])]
    here = {number for number, place in enumerate(places) if place[0] == device}
    joined = DiskBuffer("<dddii")
    try:
        for portion in trace.work.portions():
            launches = trace.launches_of({work[0] for work in portion})
            for correlation, start, spent, name, place, _ in portion:
                if place in here:
                    launch = launches.get(correlation)
                    at = math.nan if launch is None else launch[0]
                    joined.add(start, start, start, start + spent, at, name, place)
        for start, end, at, name, place in joined.in_order():
            yield Activity(start, end, at, places[place][1], kinds[name], names[name])
    finally:
        joined.close()


def _kind(name: str) -> str:
    verdict = classify(name).verdict
    return COLLECTIVE if verdict == "other" and is_collective(name) else verdict


MOST = 6000
"""Pieces that are kept of a window and a device, the longest ones."""
STEPS = 12
"""Steps that are kept of a trace."""

Device = int | str | None


class Piece(NamedTuple):
    """A kernel or a copy.

    Attributes:
        start_us: On the GPU.
        duration_us: Its length.
        stream: Its stream, as the trace names it.
        kind: A kernel's verdict by name, ``collective`` or ``copy``.
        name: Of the kernel; "" for a copy.
    """

    start_us: float
    duration_us: float
    stream: str
    kind: str
    name: str


@dataclass(frozen=True)
class StepPieces:
    """A step in pieces.

    Attributes:
        step: Its window; that of the whole trace where nothing marks steps.
        pieces: By start; the longest ``MOST``.
        left_out: How many shorter ones there are.
        left_out_us: Their time.
        busy_until_us: Until when what had started before the step ran on the same device.
    """

    step: Window
    pieces: tuple[Piece, ...]
    left_out: int = 0
    left_out_us: float = 0.0
    busy_until_us: float = -math.inf


@dataclass
class _Kept:
    """The longest pieces of a window on one device."""

    heap: list[tuple[float, int, Piece]] = field(default_factory=list)
    seen: int = 0
    total_us: float = 0.0
    busy_until_us: float = -math.inf

    def add(self, piece: Piece) -> None:
        self.seen += 1
        self.total_us += piece.duration_us
        entry = (piece.duration_us, -self.seen, piece)
        if len(self.heap) < MOST:
            heapq.heappush(self.heap, entry)
        elif entry > self.heap[0]:
            heapq.heapreplace(self.heap, entry)


def chosen_steps(timeline: Timeline, most: int = STEPS) -> tuple[Window, ...]:
    """The steps to draw: all of them, or the first, the longest, the usual one and some between."""
    steps = timeline.steps
    if not steps:
        return (timeline.whole,)
    usual = timeline.usual_step
    longest = max(range(len(steps)), key=lambda i: steps[i].wall_us)
    wanted = {0, longest, *(i for i, step in enumerate(steps) if step is usual)}
    every = max(1, -(-len(steps) // most))
    for i in range(0, len(steps), every):
        if len(wanted) < most:
            wanted.add(i)
    return tuple(steps[i] for i in sorted(wanted))


def read_pieces(path: str | os.PathLike[str], windows: Sequence[Window]) -> tuple[StepPieces, ...]:
    """What ran in some windows of a trace, on the device that worked most in them.

    Args:
        path: The trace.
        windows: By start; a piece belongs to the one that it starts in.

    Raises:
        InputError: If the trace cannot be read.
    """
    starts = [window.start_us for window in windows]
    kept: dict[Device, list[_Kept]] = defaultdict(lambda: [_Kept() for _ in windows])
    kinds: dict[str, str] = {"": COPY}
    for event in read(path):
        if not isinstance(event, Kernel | Copy):
            continue
        at = bisect_right(starts, event.start_us) - 1
        end = event.start_us + event.duration_us
        for later in range(at + 1, bisect_left(starts, end)):
            before = kept[event.device][later]
            before.busy_until_us = max(before.busy_until_us, end)
        if at < 0 or event.start_us >= windows[at].end_us:
            continue
        name = event.name if isinstance(event, Kernel) else ""
        if name not in kinds:
            kinds[name] = _kind(name)
        piece = Piece(event.start_us, event.duration_us, str(event.stream), kinds[name], name)
        kept[event.device][at].add(piece)
    if not kept:
        return ()
    busiest = max(kept.values(), key=lambda each: sum(k.total_us for k in each))
    return tuple(_step(window, k) for window, k in zip(windows, busiest, strict=True) if k.seen)


def _step(window: Window, kept: _Kept) -> StepPieces:
    pieces = sorted(entry[2] for entry in kept.heap)
    held = sum(piece.duration_us for piece in pieces)
    out = kept.seen - len(pieces)
    left_out_us = kept.total_us - held if out else 0.0
    return StepPieces(window, tuple(pieces), out, left_out_us, kept.busy_until_us)
