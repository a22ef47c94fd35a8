"""Links each kernel to the operation and the module that launched it.

A kernel carries the correlation id of the call that launched it. That call happened inside operations
on the same thread, and the innermost one is the kernel's operation. Its module is the innermost
``nn.Module`` span around it; a backward operation takes the module of the forward operation with
the same sequence number. ``External id`` is never used: in real traces it names the wrong operation.
A replayed CUDA graph is launched as a whole, so its kernels have no operation; they are counted
separately.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mpdiag.tensorcores.collected import (
    BACKWARD,
    COPY,
    MODULE,
    OPERATION,
    Collected,
    KernelSum,
    Signature,
)

REMEMBERED = 100_000
"""Forward operations remembered until their backward runs; the oldest are dropped first."""


class KernelOrigin(NamedTuple):
    """The operation, module and pass that launched a kernel.

    Attributes:
        signature: Its operation; None where it could not be linked.
        module: The module; "" where unknown.
        phase: See ``OperationTime``.
    """

    signature: Signature | None
    module: str
    phase: Literal["forward", "backward", ""]


@dataclass(frozen=True)
class Linked:
    """A whole trace, added up.

    Attributes:
        kernels: By name and origin.
        calls: Number of calls by origin, of those that launched a kernel.
        total_us: Time of all kernels.
        linked_us: Time of kernels linked to an operation.
        graph_us: Time of kernels in CUDA graphs.
        launched_us: Time of kernels whose launch is in the trace.
        devices: Time by device.
        operations: Number of operations in the trace.
    """

    kernels: dict[tuple[str, KernelOrigin], KernelSum]
    calls: dict[KernelOrigin, int]
    total_us: float
    linked_us: float
    graph_us: float
    launched_us: float
    devices: dict[int | str | None, float]
    operations: int

    @property
    def linked_fraction(self) -> float:
        """Share of kernel time that is linked to an operation."""
        return self.linked_us / self.total_us if self.total_us else 0.0

    @property
    def graph_fraction(self) -> float:
        """Share of kernel time that was replayed from CUDA graphs."""
        return self.graph_us / self.total_us if self.total_us else 0.0


def link(trace: Collected) -> Linked:
    """Add the kernels of a trace up by operation and module."""
    return _Linker(trace).finish()


_Frame = tuple[int, float, float, int, int, int]
"""A span on the host, as it is packed away: thread, start, minus its end, number of what is called, kind
and sequence number. Outer spans sort before inner ones."""


class _Linker:
    def __init__(self, trace: Collected) -> None:
        self._trace = trace
        self._names, self._signatures = trace.names.values, trace.signatures.values
        self._modules = trace.modules.values
        unlinked = KernelOrigin(None, "", "")
        self._sums = {(name, unlinked): runs for name, runs in trace.sums.items()}
        self._calls: dict[KernelOrigin, int] = {}
        self._last: dict[KernelOrigin, float] = {}
        self._pending: list[tuple[int, Signature, float, int, float]] = []
        self._forward: OrderedDict[int, str] = OrderedDict()
        self._linked = self._graph = self._launched = 0.0

    def finish(self) -> Linked:
        for portion in self._trace.work.portions():
            self._link_portion(portion)
        for name, signature, spent, sequence, start in self._pending:
            place = KernelOrigin(signature, self._forward.get(sequence, ""), "backward")
            self._count(self._names[name], place, spent, start)
        return Linked(
            self._sums,
            self._calls,
            sum(s.time_us for s in self._sums.values()),
            self._linked,
            self._graph,
            self._launched,
            self._trace.devices,
            self._trace.operations,
        )

    def _link_portion(self, works: list[tuple[Any, ...]]) -> None:
        launches = self._trace.launches_of({work[1] for work in works})
        placed: list[tuple[int, float, int, float]] = []
        for _, correlation, spent, name, _, in_graph in works:
            if name == COPY:
                continue
            launch = launches.get(correlation)
            self._launched += spent if launch else 0.0
            if in_graph or (launch and launch[2]):
                self._graph += spent
            elif launch:
                placed.append((launch[1], launch[0], name, spent))
                continue
            self._add(self._names[name], KernelOrigin(None, "", ""), spent)
        if placed:
            self._place(placed)

    def _place(self, launched: list[tuple[int, float, int, float]]) -> None:
        """Link launches to the frames around them.

        Args:
            launched: (thread, time, number of the kernel, duration) of each launch.
        """
        launched.sort()
        threads = {item[0] for item in launched}
        low, high = min(item[1] for item in launched), max(item[1] for item in launched)
        frames = sorted(
            {
                frame
                for frame in self._trace.frames.overlapping(low, high)
                if frame[0] in threads and frame[1] <= high and -frame[2] >= low
            }
        )
        stack: list[_Frame] = []
        at, last = 0, len(frames)
        for thread, time, name, spent in launched:
            here = (thread, time, math.inf)
            while at < last and frames[at] <= here:
                frame = frames[at]
                on, start = frame[0], frame[1]
                while stack and (stack[-1][0] != on or -stack[-1][2] < start):
                    stack.pop()
                stack.append(frame)
                at += 1
            around = [f for f in stack if f[0] == thread and -f[2] >= time]
            self._link_one(name, spent, around)

    def _link_one(self, name: int, spent: float, around: list[_Frame]) -> None:
        """Add a kernel up by the frames around its launch, outer ones first."""
        kernel = self._names[name]
        operation, module, backward, numbered = _innermost(around)
        if operation is None:
            self._add(kernel, KernelOrigin(None, "", ""), spent)
            return
        self._linked += spent
        signature, start = self._signatures[operation[3]], operation[1]
        inner = "" if module is None else self._modules[module[3]]
        if backward is not None:
            forward = (backward if numbered is None else numbered)[5]
            found = inner or self._forward.get(forward, "")
            if found or not self._modules:
                self._count(kernel, KernelOrigin(signature, found, "backward"), spent, start)
            else:
                self._pending.append((name, signature, spent, forward, start))
            return
        if inner:
            for frame in around:
                if frame[4] == OPERATION and frame[5] >= 0:
                    self._remember(frame[5], inner)
        phase: Literal["forward", ""] = "forward" if inner or numbered is not None else ""
        self._count(kernel, KernelOrigin(signature, inner, phase), spent, start)

    def _remember(self, sequence: int, module: str) -> None:
        self._forward[sequence] = module
        if len(self._forward) > REMEMBERED:
            self._forward.popitem(last=False)

    def _count(self, kernel: str, place: KernelOrigin, spent: float, start: float) -> None:
        self._add(kernel, place, spent)
        if self._last.get(place) != start:
            self._last[place] = start
            self._calls[place] = self._calls.get(place, 0) + 1

    def _add(self, kernel: str, place: KernelOrigin, spent: float) -> None:
        key = (kernel, place)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = KernelSum()
        found.add(1, spent)


def _innermost(around: list[_Frame]) -> tuple[_Frame | None, ...]:
    """The innermost operation, module, backward operation, and operation with a sequence number."""
    operation = module = backward = numbered = None
    for frame in reversed(around):
        kind = frame[4]
        if kind == MODULE:
            module = module or frame
            continue
        operation = operation or frame
        if kind == BACKWARD:
            backward = backward or frame
        if frame[5] >= 0:
            numbered = numbered or frame
    return operation, module, backward, numbered
