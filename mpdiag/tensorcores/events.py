"""The records that trace readers yield; nothing else of a trace is kept.

Times are in microseconds of the trace's own clock. Records are named tuples because there are
millions of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mpdiag.hardware.devices import DeviceFacts

Thread = tuple[Any, Any]
"""Process and thread, as the trace numbers them."""


class Kernel(NamedTuple):
    """One run of a kernel, or several runs where the source only has their sum.

    Attributes:
        name: Demangled if the source has it so.
        start_us, duration_us: When, and for how long (``calls`` runs together).
        device, stream: Where.
        correlation: The id it shares with its launch; None where the source has none.
        graph_node: Its node in a CUDA graph; None outside graphs.
        calls: Number of runs.
        counters: Hardware counters measured with it, by name; None if none were.
        flops: FLOP of one run; None if the source does not say.
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
    """A call of the CUDA runtime or driver that started kernels; a graph launch starts many."""

    correlation: int
    start_us: float
    thread: Thread
    of_graph: bool = False


class HostOperation(NamedTuple):
    """A call of an operation on the host, such as ``aten::addmm``.

    Attributes:
        name: Such as ``"aten::addmm"``.
        start_us, end_us, thread: When and where.
        dims, types, strides, concrete: Its arguments, as the trace has them; empty if shapes
            were not recorded.
        sequence: Autograd's sequence number, shared by forward and backward; -1 if there is none.
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
    """A call of a module's ``forward``."""

    name: str
    start_us: float
    end_us: float
    thread: Thread


class Copy(NamedTuple):
    """A copy or a set of the GPU's memory: no kernel, but the GPU is not idle meanwhile.

    Attributes:
        start_us, duration_us, device, stream, correlation: As of a ``Kernel``.
    """

    start_us: float
    duration_us: float
    device: int | str | None = None
    stream: int | str | None = None
    correlation: int | None = None


HostSpanKind = Literal["step", "optimizer", "loader", "wait"]


class HostSpan(NamedTuple):
    """Something on the host that explains the GPU's time but launches no kernel of its own.

    Attributes:
        kind: A step that the program marked, an optimizer's step, a wait for the next batch, or a
            wait for the GPU.
        name: Such as ``"ProfilerStep#5"`` or ``"cudaStreamSynchronize"``.
        start_us, end_us: When.
    """

    kind: HostSpanKind
    name: str
    start_us: float
    end_us: float


def host_span_kind(name: str) -> HostSpanKind | None:
    """What a span of the host is, by the name that PyTorch gives it; None for any other name."""
    if name.startswith("ProfilerStep#"):
        return "step"
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    return "loader" if name.startswith("enumerate(DataLoader)") else None


Event = Kernel | Launch | HostOperation | ModuleSpan | Copy | HostSpan


class TraceReader(ABC):
    """A trace that is read while it is iterated; its attributes are complete at the end.

    Attributes:
        source: The program that wrote it: ``"torch.profiler"``, ``"nsys"``, ``"nsys stats"``, ``"ncu"``,
            ``"nvprof"``, ``"rocprofv3"`` or ``"rocprof"``.
        devices: The GPUs it describes, by index.
        tensor_active: Mean sampled share of time that the Tensor pipe was active; None if it was
            not sampled.
        problems: What could not be read, one sentence each.
        rank, world_size: The rank that recorded it, and of how many; None where it does not say.
        generated: What the trace says of not having been measured; "" for any other.
    """

    source: str
    tensor_active: float | None = None
    rank: int | None = None
    world_size: int | None = None
    generated: str = ""

    def __init__(self, path: Path, delimiter: str = ",") -> None:
        self._path, self._delimiter = path, delimiter
        self.devices: dict[int, DeviceFacts] = {}
        self.problems: list[str] = []

    @abstractmethod
    def __iter__(self) -> Iterator[Event]:
        """Read the file."""
