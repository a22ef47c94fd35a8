"""The steps of a trace: by what marks them on the host."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.tensorcores.events import HostSpan

StepSource = Literal["profiler", "optimizer", ""]
SOURCES = {
    "profiler": "ProfilerStep annotations",
    "optimizer": "calls of the optimizer's step",
    "": "",
}
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
