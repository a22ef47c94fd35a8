"""Links each kernel to the operation and the module that launched it.

A kernel carries the correlation id of the call that launched it. That call happened inside operations
on the same thread, and the innermost one is the kernel's operation. Its module is the innermost
``nn.Module`` span around it; a backward operation takes the module of the forward operation with
the same sequence number. ``External id`` is never used: in real traces it names the wrong operation.
A replayed CUDA graph is launched as a whole, so its kernels have no operation; they are counted
separately.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mpdiag.tensorcores.storage.collected import BACKWARD, COPY, MODULE, OPERATION, KernelSum

if TYPE_CHECKING:
    from mpdiag.tensorcores.storage.collected import Collected, Signature

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


class _Frame(NamedTuple):
    """A span on the host, as stored in the buffer: outer spans sort before inner ones."""

    thread: int
    start: float
    minus_end: float
    label: int
    kind: int
    sequence: int


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
        launches = self._trace.launches_of({work[0] for work in works})
        placed: list[tuple[int, float, int, float]] = []
        for correlation, _, spent, name, _, in_graph in works:
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
        at = 0
        for thread, time, name, spent in launched:
            here = (thread, time, math.inf)
            while at < len(frames) and frames[at] <= here:
                frame = _Frame(*frames[at])
                while stack and (
                    stack[-1].thread != frame.thread or -stack[-1].minus_end < frame.start
                ):
                    stack.pop()
                stack.append(frame)
                at += 1
            around = [f for f in stack if f.thread == thread and -f.minus_end >= time]
            self._link_one(name, spent, around)

    def _link_one(self, name: int, spent: float, around: list[_Frame]) -> None:
        kernel = self._names[name]
        operation = next((f for f in reversed(around) if f.kind != MODULE), None)
        if operation is None:
            self._add(kernel, KernelOrigin(None, "", ""), spent)
            return
        self._linked += spent
        signature = self._signatures[operation.label]
        module = next((f.label for f in reversed(around) if f.kind == MODULE), None)
        inner = "" if module is None else self._modules[module]
        backward = next((f for f in reversed(around) if f.kind == BACKWARD), None)
        if backward is not None:
            numbered = next((f for f in reversed(around) if f.sequence >= 0), backward)
            found = inner or self._forward.get(numbered.sequence, "")
            if found or not self._modules:
                place = KernelOrigin(signature, found, "backward")
                self._count(kernel, place, spent, operation.start)
            else:
                self._pending.append((name, signature, spent, numbered.sequence, operation.start))
            return
        if inner:
            for frame in around:
                if frame.kind == OPERATION and frame.sequence >= 0:
                    self._remember(frame.sequence, inner)
        phase: Literal["forward", ""] = (
            "forward" if inner or any(f.sequence >= 0 for f in around) else ""
        )
        self._count(kernel, KernelOrigin(signature, inner, phase), spent, operation.start)

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
