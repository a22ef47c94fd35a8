"""One pass over what a GPU did and when: how long it worked, on what, and why it did not."""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from mpdiag.files.documents import finite
from mpdiag.tensorcores.causes import is_collective
from mpdiag.tensorcores.collected import PORTION, Collected
from mpdiag.tensorcores.events import HostSpan
from mpdiag.tensorcores.kernels.classification import classify
from mpdiag.tensorcores.roofline import speedup
from mpdiag.tensorcores.timeline import host_spans

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
    """What a device did, by start; nothing where the trace does not say when."""
    if not trace.timed:
        return
    names, places = trace.names.values, trace.places.values
    kinds = [COPY, *(kind_of(name) for name in names[1:])]
    here = {number for number, place in enumerate(places) if place[0] == device}
    works = trace.work.in_order()
    while portion := list(islice(works, PORTION)):
        launches = trace.launches_of({work[1] for work in portion})
        for start, correlation, spent, name, place, _ in portion:
            if place in here:
                launch = launches.get(correlation)
                at = math.nan if launch is None else launch[0]
                stream, kind = places[place][1], kinds[name]
                yield Activity(start, start + spent, at, stream, kind, names[name])


def kind_of(name: str) -> str:
    """The kind of a kernel: its verdict by name, or ``"collective"``."""
    verdict = classify(name).verdict
    return COLLECTIVE if verdict == "other" and is_collective(name) else verdict


LONGEST = 10
"""Gaps that are listed."""


@dataclass(frozen=True)
class Window:
    """A part of the trace on the GPU: a step, or all of it. Times are in microseconds.

    Attributes:
        name: The step's number; "" for all of it.
        start_us, end_us: From its first activity to the first of the next step (the last: to its end).
        kernel_us: Kernel time by verdict, collectives apart (``"collective"``); kernels that ran at
            the same time count each.
        busy_us: When any kernel or copy ran.
        collective_us, compute_us: When any collective ran, and any other kernel.
        exposed_us: When a collective ran, and no other kernel.
        copying_us: When a copy ran, and no kernel.
        gaps: Idle time by cause.
    """

    name: str
    start_us: float
    end_us: float
    kernel_us: dict[str, float]
    busy_us: float
    collective_us: float
    compute_us: float
    exposed_us: float
    copying_us: float
    gaps: dict[host_spans.GapCause, float]

    @property
    def wall_us(self) -> float:
        """Its length."""
        return self.end_us - self.start_us

    @property
    def idle_us(self) -> float:
        """When neither a kernel nor a copy ran."""
        return max(0.0, self.wall_us - self.busy_us)

    @property
    def idle_fraction(self) -> float:
        """Share of its length in which the GPU was idle."""
        return self.idle_us / self.wall_us if self.wall_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """An entry of ``steps``, and the first part of ``timeline``."""
        return {
            "name": self.name or None,
            "wall_us": self.wall_us,
            "kernel_us": self.kernel_us,
            "busy_us": self.busy_us,
            "idle_us": self.idle_us,
            "idle_fraction": self.idle_fraction,
            "idle_bound": finite(speedup(self.idle_fraction)),
            "idle_causes": {
                cause: {"time_us": spent, "bound": finite(speedup(spent / self.wall_us))}
                for cause, spent in self.gaps.items()
                if spent
            },
            "collective_us": self.collective_us,
            "exposed_collective_us": self.exposed_us,
            "compute_us": self.compute_us,
            "copying_us": self.copying_us,
        }


@dataclass(frozen=True)
class Stream:
    """The work of one stream.

    Attributes:
        stream: Its name, as the trace has it.
        activities: Kernels and copies.
        busy_us: When one of them ran.
        gaps, idle_us: Times without, between its first and its last, and their sum.
    """

    stream: str
    activities: int
    busy_us: float
    gaps: int
    idle_us: float


@dataclass(frozen=True)
class Timeline:
    """The GPU's time.

    Attributes:
        whole: From the first activity to the last.
        steps: Each step that ran something, in order; () where nothing marks steps.
        marks: What marks them.
        streams: By busy time.
        longest: The gaps to list, longest first.
        spans_left_out: Whether some of the host's waits were not kept.
    """

    whole: Window
    steps: tuple[Window, ...]
    marks: host_spans.StepMarks
    streams: tuple[Stream, ...]
    longest: tuple[host_spans.Gap, ...]
    spans_left_out: bool = False

    @property
    def later_steps(self) -> tuple[Window, ...]:
        """All steps but the first, which compiles, warms up, or began before the trace."""
        return self.steps[1:]

    @property
    def usual_step(self) -> Window | None:
        """The step of the median length among the later ones; the only one where there is one."""
        later = sorted(self.later_steps or self.steps, key=lambda step: step.wall_us)
        return later[(len(later) - 1) // 2] if later else None

    @property
    def median_us(self) -> float | None:
        """The median length of the later steps; None where there are none."""
        return median(s.wall_us for s in self.later_steps) if self.later_steps else None

    def to_json(self) -> dict[str, Any]:
        """The ``timeline`` of ``mpdiag profile --json``."""
        return {
            **self.whole.to_json(),
            "steps_by": self.marks.source or None,
            "steps": [step.to_json() for step in self.steps],
            "median_step_us": self.median_us,
            "streams": [asdict(stream) for stream in self.streams],
            "longest_gaps": [
                {
                    "at_us": gap.start_us - self.whole.start_us,
                    "duration_us": gap.duration_us,
                    "cause": gap.cause,
                    "before": gap.before or None,
                    "after": gap.after or None,
                    "host_call": gap.host or None,
                }
                for gap in self.longest
            ],
            "host_spans_left_out": self.spans_left_out,
        }


def make_timeline(
    activities: Iterable[Activity], spans: Sequence[HostSpan], *, spans_left_out: bool = False
) -> Timeline | None:
    """The timeline of one device, from its activities by start and the host's spans in any order.

    Returns:
        None where there are no activities.
    """
    sweep = _Sweep(host_spans.find_steps(spans), host_spans.HostCalls(spans))
    for activity in activities:
        sweep.take(activity)
    return sweep.finish(spans_left_out=spans_left_out)


class _Union:
    """The length of a union of intervals that come by their start."""

    __slots__ = ("reach", "total")

    def __init__(self) -> None:
        self.reach = -math.inf
        self.total = 0.0

    def add(self, start: float, end: float) -> None:
        reach = self.reach
        if end > reach:
            self.total += end - (start if start > reach else reach)  # noqa: FURB136 - a third of the time
            self.reach = end

    def until(self, moment: float) -> float:
        """Its length before a moment at or after the last start."""
        return self.total - max(0.0, self.reach - moment)


@dataclass(slots=True)
class _Open:
    """A window while it is measured; lengths of the unions are those when it began."""

    name: str
    start: float
    begun: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gaps: dict[host_spans.GapCause, float] = field(
        default_factory=lambda: dict.fromkeys(host_spans.GAP_CAUSES, 0.0)
    )

    def closed(self, end: float, now: tuple[float, float, float, float]) -> Window:
        busy, collective, compute, either = (b - a for a, b in zip(self.begun, now, strict=True))
        return Window(
            self.name,
            self.start,
            end,
            dict(self.kernels),
            busy,
            collective,
            compute,
            max(0.0, either - compute),
            max(0.0, busy - either),
            self.gaps,
        )


@dataclass(slots=True)
class _Lane:
    """A stream while it is measured."""

    union: _Union = field(default_factory=_Union)
    activities: int = 0
    gaps: int = 0
    idle: float = 0.0


class _Sweep:
    """Adds activities up, one after the other."""

    def __init__(self, marks: host_spans.StepMarks, calls: host_spans.HostCalls) -> None:
        self._marks = marks
        self._calls = calls
        self._busy, self._collective, self._compute, self._either = (_Union() for _ in range(4))
        self._whole: _Open | None = None
        self._step: _Open | None = None
        self._number = -1
        self._steps: dict[int, _Open] = {}
        self._closed: dict[int, Window] = {}
        self._step_end = 0.0
        self._lanes: dict[int | str | None, _Lane] = defaultdict(_Lane)
        self._longest: list[tuple[float, int, host_spans.Gap]] = []
        self._gaps = 0
        self._last = ""

    def take(self, activity: Activity) -> None:
        start, end = activity.start_us, activity.end_us
        if self._whole is None:
            self._whole = _Open("", start)
        number = self._marks.of(activity.launched_us)
        if number is not None and number > self._number:
            self._begin_step(number, start)
        self._gap_before(activity)
        self._lane(activity)
        self._busy.add(start, end)
        if activity.kind == COLLECTIVE:
            self._collective.add(start, end)
        elif activity.kind != COPY:
            self._compute.add(start, end)
        if activity.kind != COPY:
            self._either.add(start, end)
            self._whole.kernels[activity.kind] += end - start
            if number is not None and number in self._steps:
                self._steps[number].kernels[activity.kind] += end - start
        if number is not None and number == self._number:
            self._step_end = max(self._step_end, end)
        self._last = activity.name

    def _begin_step(self, number: int, start: float) -> None:
        self._end_step(start)
        name = self._marks.names[number]
        self._step = self._steps[number] = _Open(name, start, self._measure(start))
        self._number, self._step_end = number, start

    def _end_step(self, end: float) -> None:
        if self._step is not None:
            self._closed[self._number] = self._step.closed(end, self._measure(end))
            self._step = None

    def _measure(self, moment: float) -> tuple[float, float, float, float]:
        unions = (self._busy, self._collective, self._compute, self._either)
        busy, collective, compute, either = (union.until(moment) for union in unions)
        return busy, collective, compute, either

    def _gap_before(self, activity: Activity) -> None:
        reach = self._busy.reach
        if not reach < activity.start_us or self._whole is None or math.isinf(reach):
            return
        cause, host = self._calls.explain(reach, activity.launched_us)
        length = activity.start_us - reach
        self._whole.gaps[cause] += length
        if self._step is not None and self._step.start < activity.start_us:
            self._step.gaps[cause] += length
        elif self._closed:  # it ends the step before
            self._closed[max(self._closed)].gaps[cause] += length
        self._gaps += 1
        if len(self._longest) < LONGEST or length > self._longest[0][0]:
            gap = host_spans.Gap(reach, activity.start_us, cause, self._last, activity.name, host)
            heapq.heappush(self._longest, (length, -self._gaps, gap))
            if len(self._longest) > LONGEST:
                heapq.heappop(self._longest)

    def _lane(self, activity: Activity) -> None:
        lane = self._lanes[activity.stream]
        lane.activities += 1
        pause = activity.start_us - lane.union.reach
        if 0 < pause < math.inf:
            lane.gaps += 1
            lane.idle += pause
        lane.union.add(activity.start_us, activity.end_us)

    def finish(self, *, spans_left_out: bool) -> Timeline | None:
        if self._whole is None:
            return None
        if self._step is not None:
            # Work after the last step's mark is in no step: measure to the step's own end.
            self._end_step(self._step_end)
        end = self._busy.reach
        streams = [
            Stream(str(name), lane.activities, lane.union.total, lane.gaps, lane.idle)
            for name, lane in self._lanes.items()
        ]
        return Timeline(
            self._whole.closed(end, self._measure(end)),
            tuple(self._final(n) for n in sorted(self._closed)),
            self._marks,
            tuple(sorted(streams, key=lambda s: -s.busy_us)),
            tuple(item[2] for item in sorted(self._longest, reverse=True)),
            spans_left_out,
        )

    def _final(self, number: int) -> Window:
        """A closed step with the time of its kernels that ran after the next step had begun."""
        window = self._closed[number]
        window.kernel_us.update(self._steps[number].kernels)
        return window
