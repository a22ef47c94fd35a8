"""Kernels as XLA's profiler shows them, in an XSpace or in Chrome's JSON (``trace.json.gz``).

A process stands for a device, a thread for a stream. Lines that are derived from the streams (``XLA
Ops``, ``Steps``) show the same time again. Each kernel names the operation that it belongs to, as JAX or
TensorFlow calls it: ``jit(step)/layer/dot_general``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from mpdiag.tensorcores.events import Event, HostOperation, Kernel, ModuleSpan, Placement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEVICE = re.compile(r"/device:(GPU|TPU):(\d{1,6})|(GPU)(\d{1,6})$")
"""The name of a device; the second form is that of rocprof's JSON."""
STREAM = "Stream #"
DERIVED = re.compile(
    r"^(?:Steps|XLA |Framework |TensorFlow |Source|Launch Stats|Async XLA|CUPTI overhead)"
)
COPIES = re.compile(r"^(?:Mem(?:cpy|set)|Copy(?:Host|Device))")
LARGEST = 1e18
"""The largest plausible time, in microseconds."""
_OPERATION = ("tf_op", "hlo_op", "name")
"""The statistics that name an operation, the most telling first."""


class XlaRun(NamedTuple):
    """One run of a kernel, and the operation that XLA names for it; empty if it names none."""

    name: str
    start_us: float
    duration_us: float
    operation: str


def operation_of(said: Mapping[str, Any]) -> str:
    """The operation among a kernel's statistics."""
    found = (said.get(key) for key in _OPERATION)
    return next((value for value in found if isinstance(value, str) and value), "")


def run_events(run: XlaRun, device: int, stream: str, number: int) -> Iterator[Event]:
    """A kernel, and around its start the operation and the module that XLA names for it.

    Args:
        run: The run.
        device: The GPU's index.
        stream: The name of its line.
        number: A number for it alone, which links the kernel with the operation.
    """
    if not run.operation:
        yield Kernel(run.name, run.start_us, run.duration_us, device, stream)
        return
    thread, end = (device, stream), run.start_us + run.duration_us
    path, _, operation = run.operation.rstrip(":").rpartition("/")
    if path:
        yield ModuleSpan(path, run.start_us, end, thread)
    backward = "transpose(" in path
    yield HostOperation(operation, run.start_us, end, thread, backward=backward)
    yield Placement(number, run.start_us, thread)
    yield Kernel(run.name, run.start_us, run.duration_us, device, stream, number)


class XlaLines:
    """The events of Chrome's JSON that lie on the lines of devices.

    Attributes:
        found: Whether there was a kernel.
    """

    def __init__(self) -> None:
        self.found = False
        self._devices: dict[Any, int] = {}
        self._streams: dict[tuple[Any, Any], str] = {}
        self._numbers = 0

    def take(
        self, raw: dict[str, Any], start: float | None, spent: float | None
    ) -> Iterator[Event]:
        """What an event says: of a line's name nothing, of a kernel the events for it.

        Args:
            raw: The event.
            start: When, in microseconds; None where it has no time.
            spent: For how long.
        """
        args = raw.get("args")
        if raw.get("ph") == "M":
            self._name(raw, args)
            return
        name, place = raw.get("name"), _place(raw)
        if place[0] in self._devices and start is not None and spent is not None:
            line = self._streams.get(place, "")
            kernel = isinstance(name, str) and name and not COPIES.match(name)
            if not kernel or DERIVED.match(line) or spent < 0:
                return
            self.found = True
            self._numbers += 1
            said = operation_of(args) if isinstance(args, dict) else ""
            run = XlaRun(str(name), start, spent, said)
            yield from run_events(run, self._devices[place[0]], line, self._numbers)

    def _name(self, raw: dict[str, Any], args: Any) -> None:
        said = args.get("name") if isinstance(args, dict) else None
        if not isinstance(said, str):
            return
        if raw.get("name") == "process_name":
            found = DEVICE.match(said)
            if found and "GPU" in (found[1], found[3]):
                self._devices[_place(raw)[0]] = int(found[2] or found[4])
        elif raw.get("name") == "thread_name":
            self._streams[_place(raw)] = said


def _place(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """The process and the thread of an event; None for one that is no number and no word."""
    process, thread = raw.get("pid"), raw.get("tid")
    return (
        process if isinstance(process, (int, float, str)) else None,
        thread if isinstance(thread, (int, float, str)) else None,
    )
