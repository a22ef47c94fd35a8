"""Traces of torch.profiler: Chrome's JSON, plain or compressed, of every version since 2021.

The file is read in one pass, event by event. Of the top level only ``deviceProperties``,
``distributedInfo`` and ``generated`` (a note that a trace was not measured) are read: the rest may
hold a dump of the environment, which is never kept and never shown.
``External id`` is not used because it is wrong in real traces.
"""

import gzip
import io
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import (
    Copy,
    Event,
    HostOperation,
    HostSpan,
    Kernel,
    Launch,
    ModuleSpan,
    TraceReader,
    host_span_kind,
)
from mpdiag.tensorcores.readers.json_stream import Damaged, JsonStream

MODULE = "nn.Module: "
LARGEST = 1e18
"""The largest plausible time, in microseconds."""
MANY = 20_000
"""After so many events of other programs, and none of ours, the rest is not read."""
FAR = 1 << 25
"""Characters without an event of ours after which the rest is not read."""
_OURS = re.compile(
    r"(?:gpu|user|cpu|cuda|hip|xpu)_|overhead|Trace|Kernel|Memcpy|Memset", re.IGNORECASE
)
"""Categories of torch.profiler that are not kept."""
_START = re.compile(r'\{\s*"ph"\s*:')
# Events that need no decoding: arrows from launch to kernel, Python frames that are not modules, and
# runtime calls that neither start work nor wait; and what lies between two events. A brace in a string
# only costs the decoding after all.
_SKIPPED = re.compile(
    r'((?:[\s,]*\{\s*"ph"\s*:\s*"(?:[sftiI]"[^{}]*\}'
    r'|X"\s*,\s*"cat"\s*:\s*"(?:python_function"\s*,\s*"name"\s*:\s*"(?!nn\.Module)'
    r'|(?:cuda_(?:runtime|driver)|Runtime)"\s*,\s*"name"\s*:\s*"(?![^"]*(?:aunch|ynchron|Mem[cs])))[^"\\{}]*"'
    r"[^{}]*\{[^{}]*\}\s*\})(?=\s*[,\]]))+)?[\s,]*"
)


class TorchTrace(TraceReader):
    """A trace of torch.profiler."""

    source = "torch.profiler"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._damaged = 0
        self._seen = 0
        self._kept = False

    def __iter__(self) -> Iterator[Event]:
        with self._path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = gzip.GzipFile(fileobj=file) if packed else file
            text = io.TextIOWrapper(cast("io.BufferedReader", raw), "utf-8-sig", errors="replace")
            yield from self._document(JsonStream(text))
        if self._damaged:
            self.problems.append(f"left out {counted(self._damaged, 'damaged event')} of the trace")

    def _document(self, stream: JsonStream) -> Iterator[Event]:
        first = stream.peek()
        if first == "[":
            yield from self._array(stream)
            return
        if first != "{":
            raise DamagedTrace(self._no_trace())
        stream.at += 1
        while stream.peek() not in ("}", ""):
            try:
                key = self._key(stream)
                if key == "traceEvents" and stream.peek() == "[":
                    yield from self._array(stream)
                    continue
                stream.peek()
                value = stream.value()
            except Damaged:
                if self._seen:
                    self.problems.append("the trace is damaged after its last event")
                    return
                if not stream.find(_EVENTS, FAR):
                    break
                continue
            self._take_facts(key, value)
        if not self._seen:
            raise DamagedTrace(self._no_trace())

    def _take_facts(self, key: Any, value: Any) -> None:
        """Keep what the top level says of devices and ranks, and nothing else of it."""
        if key == "deviceProperties":
            self.devices = devices(value)
        elif key == "distributedInfo" and isinstance(value, dict):
            self.rank = _whole(value.get("rank"))
            self.world_size = _whole(value.get("world_size"))
        elif key == "generated" and isinstance(value, str):
            self.generated = value[:200]

    @staticmethod
    def _key(stream: JsonStream) -> Any:
        key = stream.value()
        if stream.peek() != ":":
            raise Damaged
        stream.at += 1
        return key

    def _array(self, stream: JsonStream) -> Iterator[Event]:
        stream.at += 1
        while True:
            # It always matches, if only nothing.
            skipped = cast("re.Match[str]", _SKIPPED.match(stream.text, stream.at))
            stream.at = at = skipped.end()
            if skipped.lastindex:
                self._seen += 1
            character = stream.text[at : at + 1] or stream.peek()
            if character == "]":
                stream.at += 1
                return
            if not character:
                if not self._seen:
                    raise DamagedTrace(self._no_trace())
                self.problems.append("the trace ends in the middle of its events")
                return
            try:
                raw = stream.value()
            except Damaged:
                self._damaged += 1
                if not stream.find(_START, math.inf if self._kept else FAR) and not self._kept:
                    raise DamagedTrace(self._no_trace()) from None
                continue
            self._seen += 1
            event = _event(raw)
            if event is not None:
                self._kept = True
                yield event
            elif self._kept and type(raw) is dict and "cat" in raw:  # the usual case
                self._damaged += _lost(raw)
            else:
                self._pass_over(raw)

    def _pass_over(self, raw: Any) -> None:
        """Note what an event that is not kept says of the trace: damage, or torch.profiler's own."""
        if _lost(raw):
            self._damaged += 1
        elif isinstance(raw.get("cat"), str) and _OURS.match(raw["cat"]):
            self._kept = True
        if not self._kept and self._seen > MANY:
            raise DamagedTrace(self._no_trace())

    def _no_trace(self) -> str:
        return (
            f"{self._path} holds no events of torch.profiler: name the file that "
            "export_chrome_trace wrote"
        )


_EVENTS = re.compile(r'"traceEvents"\s*:')


def devices(value: Any) -> dict[int, DeviceFacts]:
    """The devices in ``deviceProperties``; implausible values are left out."""
    found = {}
    for i, properties in enumerate(value if isinstance(value, list) else []):
        if not isinstance(properties, dict):
            continue
        major, minor = (
            _whole(properties.get("computeMajor")),
            _whole(properties.get("computeMinor")),
        )
        index = _whole(properties.get("id"))
        name = properties.get("name")
        found[i if index is None else index] = DeviceFacts(
            name=name.strip()[:200] if isinstance(name, str) else "",
            capability=None if major is None or minor is None else (major, minor),
            processors=_whole(properties.get("numSms")),
            memory_bytes=_whole(properties.get("totalGlobalMem")),
        )
    return found


def _event(raw: Any) -> Event | None:
    """The event as a record; None if it is damaged or of a kind that is not kept."""
    if not isinstance(raw, dict) or raw.get("ph") != "X":
        return None
    category, name = raw.get("cat"), raw.get("name")
    if not isinstance(category, str) or not isinstance(name, str):
        return None
    make = _maker(category)
    if make is None:
        return None
    args = raw.get("args")
    if not isinstance(args, dict):
        args = {}
    start: Any = raw.get("ts")
    duration: Any = raw.get("dur", 0)
    if type(start) not in _NUMBERS or not -LARGEST < start < LARGEST:
        start = _time(start)
    if type(duration) not in _NUMBERS or not -LARGEST < duration < LARGEST:
        duration = _time(duration)
    if start is None or duration is None or duration < 0:
        return None
    return make(name, start, duration, raw, args)


def _kernel(
    name: str, start: float, duration: float, _: dict[str, Any], args: dict[str, Any]
) -> Kernel:
    return Kernel(
        name,
        start,
        duration,
        _label(args.get("device")),
        _label(args.get("stream")),
        _whole(args.get("correlation")),
        _whole(args.get("graph node id")),
    )


def _copy(
    _name: str, start: float, duration: float, _: dict[str, Any], args: dict[str, Any]
) -> Copy:
    device, stream = _label(args.get("device")), _label(args.get("stream"))
    return Copy(start, duration, device, stream, _whole(args.get("correlation")))


def _annotation(
    name: str, start: float, duration: float, _raw: dict[str, Any], _args: dict[str, Any]
) -> HostSpan | None:
    kind = host_span_kind(name)
    return None if kind is None else HostSpan(kind, name, start, start + duration)


def _launch(
    name: str, start: float, duration: float, raw: dict[str, Any], args: dict[str, Any]
) -> Launch | HostSpan | None:
    correlation = _whole(args.get("correlation"))
    if name.endswith("Synchronize"):
        return HostSpan("wait", name, start, start + duration)
    if correlation is None or not any(word in name for word in _LAUNCHES):
        return None
    return Launch(correlation, start, _thread(raw), "GraphLaunch" in name)


_LAUNCHES = ("aunch", "Memcpy", "Memset")


def _module(
    name: str, start: float, duration: float, raw: dict[str, Any], _: dict[str, Any]
) -> ModuleSpan | None:
    if not name.startswith(MODULE):
        return None
    return ModuleSpan(name[len(MODULE) :], start, start + duration, _thread(raw))


def _operation(
    name: str, start: float, duration: float, raw: dict[str, Any], args: dict[str, Any]
) -> HostOperation:
    get = args.get
    sequence, thread = get("Sequence number"), get("Fwd thread id")
    sequence = None if sequence is None else _whole(sequence)
    dims, types = get("Input Dims") or get("Input dims"), get("Input type")
    strides, concrete = get("Input Strides"), get("Concrete Inputs")
    return HostOperation(
        name,
        start,
        start + duration,
        _thread(raw),
        dims
        if type(dims) is list
        else [],  # calls would take a tenth of the time: there are millions
        types if type(types) is list else [],
        strides if type(strides) is list else [],
        concrete if type(concrete) is list else [],
        -1 if sequence is None or sequence < 0 else sequence,
        (thread is not None and bool(_whole(thread))) or name.startswith("autograd::engine"),
    )


_MAKERS: dict[str, Callable[..., Event | None]] = {
    "kernel": _kernel,
    "memcpy": _copy,
    "memset": _copy,
    "user_annotation": _annotation,
    "cpu_op": _operation,
    "operator": _operation,
    "runtime": _launch,
    "driver": _launch,
    "python_function": _module,
}
"""By category, or the last word of it in lower case (``cuda_runtime``, ``Kernel``)."""


@lru_cache(1000)
def _maker(category: str) -> Callable[..., Event | None] | None:
    return _MAKERS.get(category) or _MAKERS.get(category.lower().rpartition("_")[2])


def _thread(raw: dict[str, Any]) -> tuple[Any, Any]:
    process, thread = raw.get("pid"), raw.get("tid")
    if type(process) is int and type(thread) is int:
        return process, thread
    return _label(process), _label(thread)


def _lost(raw: Any) -> bool:
    """Whether something that should be an event is not one."""
    if not isinstance(raw, dict):
        return True
    return raw.get("ph") == "X" and str(raw.get("cat")).lower() == "kernel"


def _time(value: Any) -> float | None:
    if type(value) in _NUMBERS:  # the usual case
        return float(value) if -LARGEST < value < LARGEST else None
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        return number if -LARGEST < number < LARGEST else None
    return None


_NUMBERS = frozenset({int, float})


def _whole(value: Any) -> int | None:
    if type(value) is int:
        return value if -_FIELD < value < _FIELD else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return None


_FIELD = 1 << 62


def _label(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) or value is None else str(value)[:100]
