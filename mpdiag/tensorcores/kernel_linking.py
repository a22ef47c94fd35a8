"""Links each kernel to the operation and the module that launched it.

A kernel carries the correlation id of the call that launched it. That call happened inside operations
on the same thread, and the innermost one is the kernel's operation. Its module is the innermost
``nn.Module`` span around it; a backward operation takes the module of the forward operation with
the same sequence number. ``External id`` is never used: in real traces it names the wrong operation.
A replayed CUDA graph is launched as a whole, so its kernels have no operation; they are counted
separately.

Times are added up while reading; events that wait for their counterpart go to a ``DiskBuffer``.
"""

from __future__ import annotations

import marshal
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mpdiag.tensorcores.disk_buffer import DiskBuffer
from mpdiag.tensorcores.events import HostOperation, Kernel, Launch, ModuleSpan, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpdiag.tensorcores.events import Event

REMEMBERED = 100_000
"""Forward operations remembered until their backward runs; the oldest are dropped first."""

_OPERATION, _MODULE, _BACKWARD = 0, 1, 2


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The name and arguments of an operation. Equal ones are one object, so identity is equality."""

    name: str
    dims: Sequence[Any] = ()
    types: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    concrete: Sequence[Any] = ()


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


@dataclass(slots=True)
class KernelSum:
    """All runs of one kernel from one origin, and those measured with counters."""

    calls: int = 0
    time_us: float = 0.0
    measured: list[Kernel] = field(default_factory=list)


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


def link(events: Iterable[Event]) -> Linked:
    """Read events, in any order, and add kernels up by operation and module."""
    linker = _Linker()
    try:
        for event in events:
            linker.take(event)
        return linker.finish()
    finally:
        linker.close()


class _Numbers:
    """Numbers values consecutively, and looks them up by number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def find(self, key: Any) -> int | None:
        return self._numbers.get(key)

    def of(self, key: Any, value: Any) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number


class _Frame(NamedTuple):
    """A span on the host, as stored in the buffer: outer spans sort before inner ones."""

    thread: int
    start: float
    minus_end: float
    label: int
    kind: int
    sequence: int


class _Linker:
    def __init__(self) -> None:
        self._names, self._signatures, self._modules = _Numbers(), _Numbers(), _Numbers()
        self._threads = _Numbers()
        self._frames = DiskBuffer("<iddiiq")
        self._launches = DiskBuffer("<qdi?")
        self._kernels = DiskBuffer("<qdi?")
        self._sums: dict[tuple[str, KernelOrigin], KernelSum] = {}
        self._calls: dict[KernelOrigin, int] = {}
        self._last: dict[KernelOrigin, float] = {}
        self._devices: dict[int | str | None, float] = {}
        self._pending: list[tuple[int, Signature, float, int, float]] = []
        self._forward: OrderedDict[int, str] = OrderedDict()
        self._linked = self._graph = self._launched = 0.0
        self._operations = 0

    def take(self, event: Event) -> None:
        if isinstance(event, HostOperation):
            self._take_operation(event)
        elif isinstance(event, Kernel):
            self._take_kernel(event)
        elif isinstance(event, Launch):
            thread = self._threads.of(event.thread, None)
            number = event.correlation
            self._launches.add(number, number, number, event.start_us, thread, event.of_graph)
        elif isinstance(event, Placement):
            thread = self._threads.of(event.thread, None)
            number = event.correlation
            self._launches.add(number, number, number, event.start_us, thread, False)
        elif isinstance(event, ModuleSpan):
            self._take_module(event)

    def _take_kernel(self, kernel: Kernel) -> None:
        spent = kernel.duration_us
        self._devices[kernel.device] = self._devices.get(kernel.device, 0.0) + spent
        number = kernel.correlation
        if number is None or kernel.calls != 1 or kernel.counters is not None:
            self._add(kernel.name, KernelOrigin(None, "", ""), spent, kernel.calls, kernel)
            return
        name = self._names.of(kernel.name, kernel.name)
        graph = bool(kernel.graph_node)
        self._kernels.add(number, number, number, spent, name, graph)

    def _take_operation(self, op: HostOperation) -> None:
        if op.name.startswith("ProfilerStep"):
            return
        self._operations += 1
        key: Any = op.name
        if op.dims or op.types:
            # The fastest way to make nested lists hashable.
            content: Any = (op.name, op.dims, op.types, op.strides, op.concrete)
            key = marshal.dumps(content, 2)
        signature = self._signatures.find(key)
        if signature is None:
            content = Signature(op.name, op.dims, op.types, op.strides, op.concrete)
            signature = self._signatures.of(key, content)
        thread = self._threads.of(op.thread, None)
        kind = _BACKWARD if op.backward else _OPERATION
        start, end = op.start_us, op.end_us
        self._frames.add(start, end, thread, start, -end, signature, kind, op.sequence)

    def _take_module(self, span: ModuleSpan) -> None:
        module = self._modules.of(span.name, span.name)
        thread = self._threads.of(span.thread, None)
        start, end = span.start_us, span.end_us
        self._frames.add(start, end, thread, start, -end, module, _MODULE, -1)

    # -- at the end --------------------------------------------------------------------------------

    def finish(self) -> Linked:
        for portion in self._kernels.portions():
            self._link_portion(portion)
        for name, signature, spent, sequence, start in self._pending:
            place = KernelOrigin(signature, self._forward.get(sequence, ""), "backward")
            self._count(self._names.values[name], place, spent, start)
        return Linked(
            self._sums,
            self._calls,
            sum(s.time_us for s in self._sums.values()),
            self._linked,
            self._graph,
            self._launched,
            self._devices,
            self._operations,
        )

    def close(self) -> None:
        for spill in (self._frames, self._launches, self._kernels):
            spill.close()

    def _link_portion(self, kernels: list[tuple[Any, ...]]) -> None:
        wanted = {kernel[0] for kernel in kernels}
        launches = {
            correlation: (start, thread, graph)
            for correlation, start, thread, graph in self._launches.overlapping(
                min(wanted), max(wanted)
            )
            if correlation in wanted
        }
        placed: list[tuple[int, float, int, float]] = []
        for correlation, spent, name, in_graph in kernels:
            launch = launches.get(correlation)
            self._launched += spent if launch else 0.0
            if in_graph or (launch and launch[2]):
                self._graph += spent
            elif launch:
                placed.append((launch[1], launch[0], name, spent))
                continue
            self._add(self._names.values[name], KernelOrigin(None, "", ""), spent, 1, None)
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
                for frame in self._frames.overlapping(low, high)
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
        kernel = self._names.values[name]
        operation = next((f for f in reversed(around) if f.kind != _MODULE), None)
        if operation is None:
            self._add(kernel, KernelOrigin(None, "", ""), spent, 1, None)
            return
        self._linked += spent
        signature = self._signatures.values[operation.label]
        module = next((f.label for f in reversed(around) if f.kind == _MODULE), None)
        inner = "" if module is None else self._modules.values[module]
        backward = next((f for f in reversed(around) if f.kind == _BACKWARD), None)
        if backward is not None:
            numbered = next((f for f in reversed(around) if f.sequence >= 0), backward)
            found = inner or self._forward.get(numbered.sequence, "")
            if found or not self._modules.values:
                place = KernelOrigin(signature, found, "backward")
                self._count(kernel, place, spent, operation.start)
            else:
                self._pending.append((name, signature, spent, numbered.sequence, operation.start))
            return
        if inner:
            for frame in around:
                if frame.kind == _OPERATION and frame.sequence >= 0:
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
        self._add(kernel, place, spent, 1, None)
        if self._last.get(place) != start:
            self._last[place] = start
            self._calls[place] = self._calls.get(place, 0) + 1

    def _add(
        self, kernel: str, place: KernelOrigin, spent: float, calls: int, run: Kernel | None
    ) -> None:
        key = (kernel, place)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = KernelSum()
        found.calls += calls
        found.time_us += spent
        if run is not None and run.counters is not None:
            found.measured.append(run)
