"""A trace that was opened in the browser, or several of one run: everything that its page draws.

The same readers and the same document as ``mpdiag profile``. The steps to draw are read from the
trace once more. Of each the longest pieces are kept, so that a trace of any length takes no more memory
than ``MOST`` pieces a step.
"""

import heapq
import math
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpdiag.tensorcores.events import Copy, Kernel
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.timeline.host_spans import Gap
from mpdiag.tensorcores.timeline.ranks import compare_ranks
from mpdiag.tensorcores.timeline.sweep import COPY, Timeline, Window, kind_of
from mpdiag.tensorcores.trace_analysis import NOT_TRACES, profile_trace

ENDINGS = (
    *("json", "gz", "sqlite", "db", "csv", "pb", "txt", "jsonl", "jsonlines", "pt"),
    *("nsys-rep", "ncu-rep"),
)
"""How names of traces end; of the last two kinds the readers say what to export instead."""

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
            kinds[name] = kind_of(name)
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


@dataclass(frozen=True)
class OpenedTrace:
    """What one or several traces say.

    Attributes:
        name: Of the file; of several ranks, of the one that is shown.
        document: As ``mpdiag profile --json`` prints it.
        steps: Steps in pieces; () where the trace does not say when its kernels ran.
        gaps: The longest gaps of the trace, as many as its timeline keeps.
        ranks: As ``mpdiag profile --json`` prints several ranks; None for one trace.
    """

    name: str
    document: Mapping[str, Any]
    steps: tuple[StepPieces, ...] = ()
    gaps: tuple[Gap, ...] = field(default=())
    ranks: Mapping[str, Any] | None = None


def open_traces(paths: Sequence[Path]) -> OpenedTrace:
    """Read one trace, or those of several ranks, of which the slowest is shown.

    Raises:
        InputError: If one cannot be read, or they are not of one run.
    """
    profiles = [profile_trace(path) for path in paths]
    ranks, shown = None, 0
    if len(profiles) > 1:
        found = compare_ranks(profiles)
        ranks = found.to_json()
        shown = [p.path for p in profiles].index(found.slowest.trace)
    profile, timeline = profiles[shown], profiles[shown].timeline
    steps = read_pieces(paths[shown], chosen_steps(timeline)) if timeline is not None else ()
    gaps = timeline.gaps if timeline is not None else ()
    return OpenedTrace(Path(profile.path).name, profile.to_json(), steps, gaps, ranks)


def traces_beside(folder: Path) -> list[Path]:
    """The files in a folder that may be traces, by name; their content decides when one is opened."""
    found = (p for p in folder.iterdir() if p.suffix[1:] in ENDINGS and p.name not in NOT_TRACES)
    return sorted(p for p in found if p.is_file())
