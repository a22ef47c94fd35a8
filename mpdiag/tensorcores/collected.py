"""The records of a trace, packed away while it is read.

Whatever waits for its counterpart goes to a ``DiskBuffer``, so that a large trace takes no more memory
than a small one. ``kernel_linking`` and ``timeline`` take it out again, each in its own order.
"""

import marshal
import math
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import IO, Any

from mpdiag.tensorcores.events import (
    Copy,
    Event,
    HostOperation,
    HostSpan,
    Kernel,
    Launch,
    ModuleSpan,
    host_span_kind,
)

MOST_SPANS = 200_000
"""Spans of the host that are kept; of a longer trace the rest are left out, which is said."""
OPERATION, MODULE, BACKWARD = 0, 1, 2
"""Kinds of frames."""
COPY = 0
"""Stands for the name of a kernel where the work was a copy."""
UNLINKED = -(1 << 63)
"""The correlation of work that has none: no trace numbers a launch so."""

_MARKS = frozenset("POe")
"""First letters of the names that ``host_span_kind`` knows."""


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The name and arguments of an operation. Equal ones are one object, so identity is equality."""

    name: str
    dims: Sequence[Any] = ()
    types: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    concrete: Sequence[Any] = ()


@dataclass(slots=True)
class KernelSum:
    """All runs of one kernel from one origin, and those measured with counters."""

    calls: int = 0
    time_us: float = 0.0
    measured: list[Kernel] = field(default_factory=list)

    def add(self, calls: int, spent: float) -> None:
        """Add runs."""
        self.calls += calls
        self.time_us += spent


class Numbers:
    """Numbers values consecutively, and looks them up by number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def of(self, value: Any) -> int:
        """The number of a value that is its own key."""
        number = self._numbers.get(value)
        return self.new(value, value) if number is None else number

    def find(self, key: Any) -> int | None:
        """The number of a key; None if it has none yet."""
        return self._numbers.get(key)

    def new(self, key: Any, value: Any) -> int:
        """Number a value under a key that has no number yet."""
        number = self._numbers[key] = len(self.values)
        self.values.append(value)
        return number


class Collected:
    """A whole trace.

    Attributes:
        names: Of kernels; number 0 is no kernel's.
        signatures, modules: Of operations, and names of modules.
        threads: Of the host.
        places: Device and stream of each kernel or copy.
        frames: Spans of operations and modules on the host: thread, start, the negative of the end (so
            that outer spans sort before inner ones), number of signature or module, kind, sequence
            number.
        launches: Correlation, moment, thread, whether a CUDA graph was launched.
        work: Kernels and copies that ran once: start, correlation (or ``UNLINKED``), duration, name,
            place, whether in a CUDA graph.
        sums: Kernels of which only the sum of several runs, or a measured run, is known, by name.
        spans: What the host did besides launching, in no order.
        left_out: Whether there were more spans than are kept.
        devices: Kernel time by device.
        operations: Number of operations.
    """

    def __init__(self) -> None:
        self.names, self.signatures, self.modules = Numbers(), Numbers(), Numbers()
        self.threads, self.places = Numbers(), Numbers()
        self.names.new(None, "")
        self.frames = DiskBuffer("<iddiiq")
        self.launches = DiskBuffer("<qdi?")
        self.work = DiskBuffer("<dqdii?")
        self.sums: dict[str, KernelSum] = {}
        self.spans: list[HostSpan] = []
        self.left_out = False
        self.devices: dict[int | str | None, float] = {}
        self.operations = 0
        self._summed = False
        self._starts: set[float] = set()

    @property
    def timed(self) -> bool:
        """Whether the trace says when its kernels ran: each run apart, and not all at one moment."""
        return not self._summed and len(self._starts) > 1

    def take_all(self, events: Iterable[Event]) -> None:
        """Read events, in any order."""
        takers: dict[type, Callable[[Any], None]] = {
            HostOperation: self._take_operation,
            Kernel: self._take_kernel,
            Copy: self._take_copy,
            Launch: self._take_launch,
            ModuleSpan: self._take_module,
            HostSpan: self._take_span,
        }
        for event in events:
            takers[type(event)](event)

    def close(self) -> None:
        """Drop everything that was kept."""
        for buffer in (self.frames, self.launches, self.work):
            buffer.close()

    def launches_of(self, wanted: set[int]) -> dict[int, tuple[float, int, bool]]:
        """What ``launches`` holds, by correlation, where it is known."""
        wanted = wanted - {UNLINKED}
        if not wanted:
            return {}
        return {
            correlation: (start, thread, graph)
            for correlation, start, thread, graph in self.launches.overlapping(
                min(wanted), max(wanted)
            )
            if correlation in wanted
        }

    def _take_operation(self, op: HostOperation) -> None:
        name, start, end, thread, dims, types, strides, concrete, sequence, backward = op
        if name[0:1] in _MARKS:  # older traces have the marks among the operations
            kind = host_span_kind(name)
            if kind is not None:
                self._take_span(HostSpan(kind, name, start, end))
            if name.startswith("ProfilerStep"):
                return
        self.operations += 1
        key: Any = name
        if dims or types:
            # The fastest way to make nested lists hashable.
            content: Any = (name, dims, types, strides, concrete)
            key = marshal.dumps(content, 2)
        signature = self.signatures.find(key)
        if signature is None:
            signature = self.signatures.new(key, Signature(name, dims, types, strides, concrete))
        kind_of_frame = BACKWARD if backward else OPERATION
        number = self.threads.of(thread)
        self.frames.add(start, end, number, start, -end, signature, kind_of_frame, sequence)

    def _take_module(self, span: ModuleSpan) -> None:
        module, thread = self.modules.of(span.name), self.threads.of(span.thread)
        start, end = span.start_us, span.end_us
        self.frames.add(start, end, thread, start, -end, module, MODULE, -1)

    def _take_launch(self, launch: Launch) -> None:
        number, start, thread, of_graph = launch
        self.launches.add(number, number, number, start, self.threads.of(thread), of_graph)

    def _take_span(self, span: HostSpan) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.left_out = True

    def _take_kernel(self, kernel: Kernel) -> None:
        spent = kernel.duration_us
        self.devices[kernel.device] = self.devices.get(kernel.device, 0.0) + spent
        if kernel.calls != 1 or kernel.counters is not None:
            self._summed = True  # several runs, or one slowed down to measure it
            found = self.sums.setdefault(kernel.name, KernelSum())
            found.add(kernel.calls, spent)
            if kernel.counters is not None:
                found.measured.append(kernel)
            return
        if len(self._starts) < 2:
            self._starts.add(kernel.start_us)
        self._work(kernel, self.names.of(kernel.name), bool(kernel.graph_node))

    def _take_copy(self, copy: Copy) -> None:
        self._work(copy, COPY, in_graph=False)

    def _work(self, work: Kernel | Copy, name: int, in_graph: bool) -> None:
        number = UNLINKED if work.correlation is None else work.correlation
        place = self.places.of((work.device, work.stream))
        start, spent = work.start_us, work.duration_us
        self.work.add(start, start, start, number, spent, name, place, in_graph)


PORTION = 8192
"""Records per portion; portions are written and read as a whole."""
_OPEN = -1
_first = itemgetter(0)


class DiskBuffer:
    """Packed records in portions, which can be looked up by the range of a key.

    Only full portions go to disk, so a short trace never touches it.

    Args:
        form: The format of a record, for ``struct``.
    """

    def __init__(self, form: str) -> None:
        self._form = struct.Struct(form)
        self._pack, self._full = self._form.pack, PORTION * self._form.size
        self._file: IO[bytes] | None = None
        self._portions: list[tuple[float, float, int]] = []
        self._open = bytearray()
        self._low, self._high = math.inf, -math.inf

    def add(self, low: float, high: float, *fields: Any) -> None:
        """Append a record whose key spans [low, high]."""
        self._open += self._pack(*fields)
        if low < self._low:
            self._low = low
        if high > self._high:
            self._high = high
        if len(self._open) >= self._full:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mpdiag-")  # noqa: SIM115 - closed by close
        offset = self._file.seek(0, 2)
        self._file.write(self._open)
        self._portions.append((self._low, self._high, offset))
        self._open = bytearray()
        self._low, self._high = math.inf, -math.inf

    def portions(self) -> Iterator[list[tuple[Any, ...]]]:
        """All portions, in the order they were added."""
        for _, _, offset in self._portions:
            yield list(self._form.iter_unpack(self._read(offset)))
        if self._open:
            yield list(self._form.iter_unpack(bytes(self._open)))

    def overlapping(self, low: float, high: float) -> Iterator[tuple[Any, ...]]:
        """The records of all portions that overlap [low, high]; some records lie outside it."""
        for begin, end, offset in self._portions:
            if begin <= high and end >= low:
                yield from self._form.iter_unpack(self._read(offset))
        if self._open and self._low <= high and self._high >= low:
            yield from self._form.iter_unpack(bytes(self._open))

    def in_order(self) -> Iterator[tuple[Any, ...]]:
        """All records by their first field, which must be the low end of their key.

        Only portions that overlap are in memory together: few, where records came almost in order.
        """
        portions = sorted(self._portions)
        if self._open:
            portions = sorted([*portions, (self._low, self._high, _OPEN)])
        waiting: list[tuple[Any, ...]] = []
        for low, _, offset in portions:
            at = bisect_left(waiting, low, key=_first)
            yield from waiting[:at]
            packed = bytes(self._open) if offset == _OPEN else self._read(offset)
            waiting = sorted([*waiting[at:], *self._form.iter_unpack(packed)], key=_first)
        yield from waiting

    def _read(self, offset: int) -> bytes:
        assert self._file is not None
        self._file.seek(offset)
        return self._file.read(self._full)

    def close(self) -> None:
        """Drop every record and the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._portions.clear()
        self._open.clear()
