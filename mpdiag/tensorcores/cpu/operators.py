"""Operator times of a torch.profiler trace of a CPU: each operation's own time, by module.

Matrix work belongs to the innermost operation that has any: time inside it (layout conversions)
counts as its own, time around it (dispatch, casts) does not. The times add up to the total of all
operators. Such a trace is short and is read into memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpdiag.tensorcores.work.traced_operation import (
    MatrixWork,
    OperationTime,
    TracePhase,
    matrix_work,
)

MODULE = "nn.Module: "
"""The prefix of a module's span in a trace; the module's name follows."""

_SHAPES = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


@dataclass
class _Span:
    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    module: str | None = None  # of a module's span: its name
    work: MatrixWork | None = None
    inner: float = 0.0  # time of the operations directly inside
    parent: "_Span | None" = None

    @property
    def own(self) -> float:
        return max(0.0, self.end - self.start - self.inner)


def operator_times(events: Iterable[Mapping[str, Any]]) -> list[OperationTime]:
    """Add up the operations of ``traceEvents``, longest first."""
    threads: dict[Any, list[_Span]] = defaultdict(list)
    for event in events:
        span = _span(event)
        if span is not None:
            threads[event.get("pid"), event.get("tid")].append(span)
    spans = [span for each in threads.values() for span in _nest(each)]
    for span in [s for s in spans if s.work is not None]:
        for around in _outward(span.parent):  # the innermost operation: ``linear`` calls ``addmm``
            around.work = None
    forward = {
        span.args["Sequence number"]: span
        for span in spans
        if span.args.get("Fwd thread id") == 0 and "Sequence number" in span.args
    }
    sums: dict[tuple[str, str, TracePhase, MatrixWork | None], list[float]] = defaultdict(
        lambda: [0, 0.0]
    )
    for span in spans:
        if span.module is not None:
            continue
        owner = next((s for s in _outward(span) if s.work is not None), span)
        module, phase = _place(owner, forward)
        entry = sums[owner.name, module, phase, owner.work]
        entry[0] += owner is span
        entry[1] += span.own
    times = [
        OperationTime(op, module, work, None, int(calls), time, phase=phase)
        for (op, module, phase, work), (calls, time) in sums.items()
    ]
    return sorted(times, key=lambda o: o.time_us, reverse=True)


def _span(event: Mapping[str, Any]) -> _Span | None:
    name, start, length = event.get("name"), event.get("ts"), event.get("dur")
    if event.get("ph") != "X" or not isinstance(name, str):
        return None
    if not isinstance(start, (int, float)) or not isinstance(length, (int, float)):
        return None
    args = event.get("args")
    span = _Span(name, start, start + length, args if isinstance(args, dict) else {})
    if event.get("cat") == "cpu_op":
        span.work = matrix_work(name, *(span.args.get(field) or () for field in _SHAPES))
        return span
    if event.get("cat") in {"user_annotation", "python_function"} and name.startswith(MODULE):
        span.module = name.removeprefix(MODULE)
        return span
    return None


def _nest(spans: list[_Span]) -> list[_Span]:
    """Set the parent of each span of one thread."""
    spans.sort(key=lambda s: (s.start, -s.end))
    open_spans: list[_Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        span.parent = open_spans[-1] if open_spans else None
        around = next((s for s in _outward(span.parent) if s.module is None), None)
        if around is not None and span.module is None:
            around.inner += span.end - span.start
        open_spans.append(span)
    return spans


def _outward(span: _Span | None) -> Iterator[_Span]:
    """A span, and those around it from the inside out."""
    while span is not None:
        yield span
        span = span.parent


def _place(span: _Span, forward: Mapping[Any, _Span]) -> tuple[str, TracePhase]:
    """The module a span belongs to, and whether it ran backward."""
    for around in _outward(span):
        if around.module is not None:
            return around.module, "forward"
        number = around.args.get("Sequence number")
        if around.args.get("Fwd thread id") and number in forward:
            return _place(forward[number], {})[0], "backward"
    return "", ""
