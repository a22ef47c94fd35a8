"""The small records that every reader of a trace yields, and nothing else of a trace is kept.

Times are microseconds of the trace's own clock. They are named tuples, for there are millions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mpdiag.hardware.devices import DeviceFacts

Thread = tuple[Any, Any]
"""Process and thread, as the trace numbers them."""


class Kernel(NamedTuple):
    """One run of a kernel, or several of the same where the source only has their sum.

    Attributes:
        name: As demangled as the source has it.
        start_us, duration_us: When, and for how long (``calls`` runs together).
        device, stream: Where.
        correlation: Of its launch; None where the source has none.
        graph_node: Of a CUDA graph; None where it is of none.
        calls: How many runs these are.
        counters: Hardware counters measured with it, by name; None where none were.
        flops: Of one run, where the source says; None where not.
    """

    name: str
    start_us: float
    duration_us: float
    device: int | str | None = None
    stream: int | str | None = None
    correlation: int | None = None
    graph_node: int | None = None
    calls: int = 1
    counters: Mapping[str, float] | None = None
    flops: float | None = None


class Launch(NamedTuple):
    """A call of the runtime or the driver that started kernels; a graph's starts many."""

    correlation: int
    start_us: float
    thread: Thread
    of_graph: bool = False


class HostOperation(NamedTuple):
    """A call of an operation on the host.

    Attributes:
        name: Such as ``"aten::addmm"``.
        start_us, end_us, thread: When and where.
        dims, types, strides, concrete: What it was called with, as the trace has it; empty where
            shapes were not recorded.
        sequence: Autograd's number, the same forward and backward; -1 without.
        backward: Whether it is part of a backward pass.
    """

    name: str
    start_us: float
    end_us: float
    thread: Thread
    dims: Sequence[Any] = ()
    types: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    concrete: Sequence[Any] = ()
    sequence: int = -1
    backward: bool = False


class ModuleSpan(NamedTuple):
    """A call of a module's forward."""

    name: str
    start_us: float
    end_us: float
    thread: Thread


Event = Kernel | Launch | HostOperation | ModuleSpan


class TraceReader(Protocol):
    """A trace that is read while it is iterated; its attributes are complete at the end.

    Attributes:
        source: What wrote it: ``"torch.profiler"``, ``"nsys"``, ``"ncu"`` or ``"nvprof"``.
        devices: What it says of the GPUs, by their index.
        tensor_active: Mean share of time that the Tensor pipe was active, by a sampling of the
            device, where there was one.
        problems: What could not be read, one sentence each.
    """

    source: str
    devices: dict[int, DeviceFacts]
    tensor_active: float | None
    problems: list[str]

    def __iter__(self) -> Iterator[Event]: ...
