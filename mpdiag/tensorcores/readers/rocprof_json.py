"""Traces of rocprofv3: ``rocprofv3 --kernel-trace --output-format json``, perhaps with ``--pmc``.

One object, ``rocprofiler-sdk-tool``, holds a list with an object for each process: the GPUs
(``agents``), the kernels' names (``kernel_symbols``), the counters' names, and records that refer to all
three by number. Names may follow the records, so runs are added up by number first.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Event, Kernel, TraceReader
from mpdiag.tensorcores.readers.json_stream import Damaged, JsonStream
from mpdiag.tensorcores.readers.tables import open_text

ROOT = "rocprofiler-sdk-tool"
_GFX = re.compile(r"gfx(\d+)([0-9a-f])([0-9a-f])$")
_NAMES = ("formatted_kernel_name", "demangled_kernel_name", "kernel_name", "truncated_kernel_name")
_GPU = (2, "GPU")
_LONGEST_RUN = 1e18


@dataclass
class _KernelSum:
    """All runs of one kernel on one GPU."""

    calls: int = 0
    spent_us: float = 0.0
    counters: dict[Any, float] = field(default_factory=dict)


@dataclass
class _Process:
    """What the trace says of one process; sums are by the kernel's number and the GPU's handle."""

    names: dict[Any, str] = field(default_factory=dict)
    counters: dict[Any, str] = field(default_factory=dict)
    traced: dict[tuple[Any, Any], _KernelSum] = field(default_factory=dict)
    measured: dict[tuple[Any, Any], _KernelSum] = field(default_factory=dict)


class RocprofJsonTrace(TraceReader):
    """A JSON file of rocprofv3."""

    source = "rocprofv3"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._indices: dict[Any, int] = {}
        self._damaged = 0

    def __iter__(self) -> Iterator[Event]:
        processes: list[_Process] = []
        with open_text(self._path) as text:
            stream = JsonStream(text)
            try:
                _walk(stream, {ROOT: lambda: self._processes(stream, processes)})
            except (Damaged, RecursionError):
                self.problems.append("the trace is damaged or cut off: later records are left out")
        found = [kernel for process in processes for kernel in self._kernels(process)]
        if self._damaged:
            self.problems.append(
                f"left out {counted(self._damaged, 'damaged record')} of the trace"
            )
        if not found:
            raise DamagedTrace(
                f"{self._path} holds no kernels: record with rocprofv3 --kernel-trace "
                "--output-format json"
            )
        yield from found

    def _processes(self, stream: JsonStream, processes: list[_Process]) -> None:
        listed = stream.peek() == "["
        stream.at += listed
        while stream.peek() == "{":
            process = _Process()
            processes.append(process)
            self._process(stream, process)
            if not listed:
                return
        stream.at += stream.peek() == "]"

    def _process(self, stream: JsonStream, process: _Process) -> None:
        def take(into: Callable[[Any, _Process], None]) -> Callable[[], None]:
            return lambda: self._each(stream, process, into)

        def records() -> None:
            dispatches, counts = take(self._dispatch), take(self._counts)
            _walk(stream, {"kernel_dispatch": dispatches, "counter_collection": counts})

        _walk(
            stream,
            {
                "agents": take(self._agent),
                "kernel_symbols": take(_symbol),
                "counters": take(_counter),
                "buffer_records": records,
                "callback_records": records,
            },
        )

    def _each(
        self, stream: JsonStream, process: _Process, into: Callable[[Any, _Process], None]
    ) -> None:
        """Hand each object of a list on, one at a time."""
        if stream.peek() != "[":
            _skip(stream)
            return
        stream.at += 1
        while stream.peek() not in ("]", ""):
            record = stream.value()
            try:
                into(record, process)
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
                self._damaged += 1
        if not stream.peek():
            raise Damaged
        stream.at += 1

    def _agent(self, raw: Any, _: _Process) -> None:
        if raw["type"] not in _GPU:
            return
        handle = raw["id"]["handle"]
        if handle in self._indices:
            return
        index = self._indices[handle] = len(self._indices)
        self.devices[index] = amd_device(
            raw.get("name"), raw.get("product_name"), raw.get("cu_count")
        )

    @staticmethod
    def _dispatch(raw: Any, process: _Process) -> None:
        _add(process.traced, raw, raw["dispatch_info"])

    @staticmethod
    def _counts(raw: Any, process: _Process) -> None:
        data = raw["dispatch_data"]
        found = _add(process.measured, data, data["dispatch_info"])
        values: dict[Any, float] = {}
        for record in raw["records"]:
            handle = record["counter_id"]["handle"]
            values[handle] = values.get(handle, 0.0) + float(record["value"])
        for handle, value in values.items():
            found.counters[handle] = max(value, found.counters.get(handle, 0.0))

    def _kernels(self, process: _Process) -> Iterator[Kernel]:
        for key in {**process.traced, **process.measured}:
            measured, traced = process.measured.get(key), process.traced.get(key)
            runs = traced or measured
            assert runs is not None
            counters = None
            if measured is not None:
                counters = {
                    process.counters.get(handle, str(handle)): value
                    for handle, value in measured.counters.items()
                }
            number, handle = key
            name = process.names.get(number, f"(kernel {number})")
            device = self._indices.get(handle)
            yield Kernel(name, 0.0, runs.spent_us, device, calls=runs.calls, counters=counters)


def amd_device(gfx: Any, product: Any, units: Any) -> DeviceFacts:
    """A GPU of AMD from what its profilers say of it.

    Args:
        gfx: Such as ``gfx942``.
        product: Such as ``AMD Instinct MI300X``; may be missing.
        units: Number of compute units.
    """
    found = _GFX.match(gfx) if isinstance(gfx, str) else None
    name = next((n.strip()[:200] for n in (product, gfx) if isinstance(n, str) and n.strip()), "")
    return DeviceFacts(
        name=name,
        capability=(int(found[1]), int(found[2], 16)) if found else None,
        processors=units if type(units) is int else None,
    )


def _symbol(raw: Any, process: _Process) -> None:
    said = [raw[n] for n in _NAMES if isinstance(raw.get(n), str) and raw[n]]
    name: str = said[0]
    process.names[raw["kernel_id"]] = name.removesuffix(".kd")


def _counter(raw: Any, process: _Process) -> None:
    process.counters[raw["id"]["handle"]] = str(raw["name"])


def _add(sums: dict[tuple[Any, Any], _KernelSum], timed: Any, dispatch: Any) -> _KernelSum:
    """Count one run."""
    spent = (timed["end_timestamp"] - timed["start_timestamp"]) / 1000
    if not 0 <= spent < _LONGEST_RUN:
        raise ValueError
    key = (dispatch["kernel_id"], dispatch["agent_id"]["handle"])
    found = sums.setdefault(key, _KernelSum())
    found.calls += 1
    found.spent_us += spent
    return found


def _walk(stream: JsonStream, readers: dict[str, Callable[[], None]]) -> None:
    """Go through an object; values of other keys are skipped.

    Raises:
        Damaged: If it is not JSON, or ends too early.
    """
    if stream.peek() != "{":
        raise Damaged
    stream.at += 1
    while stream.peek() != "}":
        key = stream.value()
        if stream.peek() != ":":
            raise Damaged
        stream.at += 1
        reader = readers.get(key) if isinstance(key, str) else None
        if reader is None:
            _skip(stream)
        else:
            reader()
    stream.at += 1


def _skip(stream: JsonStream) -> None:
    """Pass over a value; lists piece by piece, for they may be longer than the memory."""
    opening = stream.peek()
    if opening == "{":
        _walk(stream, {})
        return
    if opening != "[":
        stream.value()
        return
    stream.at += 1
    while stream.peek() != "]":
        stream.value()
    stream.at += 1
