"""What the host did around the work of a GPU: where its steps end, and why the GPU had nothing to do.

============  ===================================================================================
``host``      the host launched late and waited for nothing: Python, dispatch, many small kernels
``wait``      the host had waited for the GPU (``item()``, a synchronisation), so nothing was queued
``loader``    the host waited for the next batch
``queued``    the work was launched before the gap: the device's own latency, or another stream
``unknown``   the trace does not hold the launch
============  ===================================================================================
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mpdiag.tensorcores.events import HostSpan

GapCause = Literal["host", "wait", "loader", "queued", "unknown"]
GAP_CAUSES: tuple[GapCause, ...] = ("host", "wait", "loader", "queued", "unknown")


class Gap(NamedTuple):
    """A time in which no kernel and no copy ran.

    Attributes:
        start_us, end_us: When.
        cause: See the module's table.
        before, after: The kernels around it; "" for copies.
        host: The host's call that explains it; "" where there is none.
    """

    start_us: float
    end_us: float
    cause: GapCause
    before: str
    after: str
    host: str

    @property
    def duration_us(self) -> float:
        """Its length."""
        return self.end_us - self.start_us


class HostCalls:
    """Waits of the host, given in any order, looked up by time."""

    def __init__(self, spans: Sequence[HostSpan]) -> None:
        waits = sorted((s for s in spans if s.kind == "wait"), key=lambda s: s.end_us)
        self._waits = waits
        self._ends = [s.end_us for s in waits]
        self._loaders = sorted((s for s in spans if s.kind == "loader"), key=lambda s: s.start_us)
        self._starts = [s.start_us for s in self._loaders]

    def explain(self, start_us: float, launched_us: float) -> tuple[GapCause, str]:
        """The cause of a gap, and the host's call behind it.

        Args:
            start_us: When the GPU ran out of work.
            launched_us: When the host launched the next; NaN where that is not known.
        """
        if math.isnan(launched_us):
            return "unknown", ""
        if launched_us <= start_us:
            return "queued", ""
        loading = self._loading(start_us, launched_us)
        if loading is not None:
            return "loader", loading
        at = bisect_left(self._ends, start_us)
        if at < len(self._ends) and self._ends[at] <= launched_us:
            return "wait", self._waits[at].name
        return "host", ""

    def _loading(self, start_us: float, launched_us: float) -> str | None:
        """The data loader's call, if it took at least half of the host's delay."""
        first = max(0, bisect_right(self._starts, start_us) - 1)
        last = bisect_left(self._starts, launched_us)
        shared, name = 0.0, ""
        for span in self._loaders[first:last]:
            inside = min(span.end_us, launched_us) - max(span.start_us, start_us)
            if inside > 0:
                shared, name = shared + inside, span.name
        return name if shared >= (launched_us - start_us) / 2 and name else None


StepSource = Literal["profiler", "optimizer", ""]
_NUMBER = re.compile(r"#(\d{1,15})$")


@dataclass(frozen=True)
class StepMarks:
    """When the host began and ended each step.

    Attributes:
        source: What marks them; "" where nothing does.
        names: One for each step.
        starts, ends: In microseconds, both rising.
    """

    source: StepSource
    names: tuple[str, ...] = ()
    starts: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()

    def of(self, launched_us: float) -> int | None:
        """The step in which the host launched something; None where in none of them."""
        step = bisect_right(self.starts, launched_us) - 1
        return step if step >= 0 and launched_us <= self.ends[step] else None


def find_steps(spans: Sequence[HostSpan]) -> StepMarks:
    """The steps: those that torch.profiler marked, else from one optimizer step to the next.

    A single call of an optimizer says nothing of where a step begins. Of several optimizers, the
    one that steps first counts. What comes before its first call is the first step, which may have
    begun before the trace.
    """
    marked = sorted({s[1:] for s in spans if s.kind == "step"}, key=lambda s: s[1])
    if marked:
        apart = [marked[0]]
        for name, start, end in marked[1:]:
            if start >= apart[-1][2] or name != apart[-1][0]:
                apart.append((name, start, end))
        starts = [start for _, start, _ in apart]
        ends = [min(e, s) for (_, _, e), s in zip(apart, [*starts[1:], float("inf")], strict=True)]
        names = [_number(name) or name for name, _, _ in apart]
        return StepMarks("profiler", tuple(names), tuple(starts), tuple(ends))
    calls = sorted((s for s in spans if s.kind == "optimizer"), key=lambda s: s.end_us)
    ends = [s.end_us for s in calls if s.name == calls[0].name]
    if len(ends) < 2:
        return StepMarks("")
    names = [str(i) for i in range(len(ends))]
    starts = [float("-inf"), *ends[:-1]]
    return StepMarks("optimizer", tuple(names), tuple(starts), tuple(ends))


def _number(name: str) -> str:
    found = _NUMBER.search(name)
    return found[1] if found else ""
