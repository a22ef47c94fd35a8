"""Profiles of JAX and TensorFlow: ``*.xplane.pb``, the XSpace message of XLA's profiler.

A profile holds a plane for each device, which holds a line for each stream, which holds events. Names
and statistics are numbered within their plane and listed behind its events. Planes of the host may be
hundreds of megabytes of Python frames; they are passed over. So are lines that XLA derives from the
streams (``XLA Ops``, ``Steps``), which show the same time again.

Messages: https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto
"""

from __future__ import annotations

import gzip
import mmap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.readers.formats.protobuf_wire import BYTES, VARINT, CutOff, fields
from mpdiag.tensorcores.readers.formats.tables import GZIP
from mpdiag.tensorcores.readers.xla_runs import (
    COPIES,
    DERIVED,
    DEVICE,
    LARGEST,
    STREAM,
    XlaRun,
    operation_of,
    run_events,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpdiag.tensorcores.events import Event

# Numbers of fields in xplane.proto.
_PLANE = 1
_PLANE_NAME, _LINES, _EVENT_NAMES, _STAT_NAMES, _PLANE_STATS = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_START, _EVENTS = 1, 2, 3, 4
_EVENT_NAME, _OFFSET, _DURATION, _EVENT_STATS = 1, 2, 3, 4
_KEY, _VALUE = 1, 2
_NAME = 2
_STAT_ID, _UNSIGNED, _SIGNED, _TEXT, _REFERENCE = 1, 3, 4, 5, 7

LONGEST = 1 << 31
"""Bytes to which a profile may be unpacked: the longest message of Protocol Buffers."""
_HEAD = 512
"""Bytes of a plane within which its name must be."""


@dataclass
class _Plane:
    """A device's names, and where its lines are."""

    lines: list[tuple[int, int]] = field(default_factory=list)
    events: dict[int, str] = field(default_factory=dict)
    stats: dict[int, str] = field(default_factory=dict)
    facts: list[tuple[int, int]] = field(default_factory=list)


class XplaneTrace:
    """A profile of JAX or TensorFlow; see ``events.TraceReader``."""

    source = "xla"
    tensor_active: float | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self.devices: dict[int, DeviceFacts] = {}
        self.problems: list[str] = []
        self._launches = 0

    def __iter__(self) -> Iterator[Event]:
        kinds: set[str] = set()
        found = False
        with _contents(self._path, self.problems) as data:
            try:
                for number, kind, start, end in fields(data, 0, len(data)):
                    if number != _PLANE or kind != BYTES:
                        continue
                    device = DEVICE.match(_plane_name(data, start, end))
                    if device is None:
                        continue
                    kinds.add(device[1])
                    if device[1] == "GPU":
                        for event in self._device(data, start, end, int(device[2])):
                            found = True
                            yield event
            except CutOff:
                self.problems.append("the profile is damaged or cut off: later planes are left out")
        if not found:
            where = "was recorded on a TPU: there is no GPU in it" if "TPU" in kinds else _NO_GPU
            message = f"{self._path} {where}"
            raise DamagedTrace(message)

    def _device(self, data: memoryview, start: int, end: int, index: int) -> Iterator[Event]:
        plane = _plane(data, start, end)
        self.devices[index] = _facts(data, plane)
        names = {line: _text_field(data, *line, _LINE_NAME) for line in plane.lines}
        streams = [line for line in plane.lines if names[line].startswith(STREAM)]
        for line in streams or [n for n in plane.lines if not DERIVED.match(names[n])]:
            for run in _runs(data, plane, line):
                self._launches += 1
                yield from run_events(run, index, names[line], self._launches)


_NO_GPU = "holds no GPU's kernels: profile a run on a GPU"


@contextmanager
def _contents(path: Path, problems: list[str]) -> Iterator[memoryview]:
    """The bytes of a file, plain or unpacked: on disk, so that they take no memory."""
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        if file.read(2) == GZIP:
            file.seek(0)
            file = _unpacked(file, stack.enter_context(TemporaryFile()), problems)
        if not file.seek(0, 2):
            yield memoryview(b"")
            return
        mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        yield stack.enter_context(memoryview(mapped))


def _unpacked(file: IO[bytes], into: IO[bytes], problems: list[str]) -> IO[bytes]:
    left = LONGEST
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while left > 0 and (piece := packed.read1(1 << 20)):
                left -= len(piece)
                into.write(piece)
    except Exception as error:  # zlib.error is not an OSError
        if not isinstance(error, OSError | EOFError) and type(error).__name__ != "error":
            raise
        problems.append("the profile is damaged or cut off")
    if left <= 0:
        problems.append(f"the profile is longer than {LONGEST >> 20} MB: the rest is left out")
    into.flush()
    return into


def is_xspace(head: bytes) -> bool:
    """Whether a file that begins so may be an XSpace: a plane that begins with a number or a name."""
    view = memoryview(head)
    try:
        number, kind, start, end = next(_lenient(view))
        if number != _PLANE or kind != BYTES:
            return False
        inner, inner_kind, *_ = next(_lenient(view[start:end]))
    except (CutOff, IndexError, StopIteration):
        return False
    name = _plane_name(view, start, min(end, len(view)))
    return (inner, inner_kind) in ((1, VARINT), (2, BYTES)) and name.startswith("/")


def _lenient(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Fields of a head that is cut off somewhere."""
    return fields(view, 0, 1 << 62)


def _plane_name(data: memoryview, start: int, end: int) -> str:
    try:
        for number, kind, a, b in fields(data, start, end):
            if number == _PLANE_NAME and kind == BYTES:
                return bytes(data[a : min(b, a + _HEAD)]).decode("utf-8", "replace")
            if number > _PLANE_NAME:
                break
    except (CutOff, IndexError):
        pass
    return ""


def _plane(data: memoryview, start: int, end: int) -> _Plane:
    plane = _Plane()
    for number, kind, a, b in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == _LINES:
            plane.lines.append((a, b))
        elif number == _PLANE_STATS:
            plane.facts.append((a, b))
        elif number in (_EVENT_NAMES, _STAT_NAMES):
            names = plane.events if number == _EVENT_NAMES else plane.stats
            key, name = _named(data, a, b)
            names[key] = name
    return plane


def _named(data: memoryview, start: int, end: int) -> tuple[int, str]:
    """Number and name of an entry of a plane's table."""
    key, name = 0, ""
    for number, kind, a, b in fields(data, start, end):
        if number == _KEY and kind == VARINT:
            key = a
        elif number == _VALUE and kind == BYTES:
            name = _text_field(data, a, b, _NAME)
    return key, name


def _text_field(data: memoryview, start: int, end: int, wanted: int) -> str:
    for number, kind, a, b in fields(data, start, end):
        if number == wanted and kind == BYTES:
            return bytes(data[a:b]).decode("utf-8", "replace")
    return ""


def _runs(data: memoryview, plane: _Plane, line: tuple[int, int]) -> Iterator[XlaRun]:
    """The kernels of one stream."""
    base = 0
    for number, kind, a, b in fields(data, *line):
        if number == _LINE_START and kind == VARINT:
            base = a
        if number == _EVENTS and kind == BYTES:
            run = _run(data, plane, a, b, base / 1e3)
            if run.name and not COPIES.match(run.name) and run.duration_us < LARGEST:
                yield run


def _run(data: memoryview, plane: _Plane, start: int, end: int, base_us: float) -> XlaRun:
    """One event of a stream that began at ``base_us``."""
    name, offset, duration = "", 0, 0
    said: dict[str, str] = {}
    for number, kind, a, b in fields(data, start, end):
        if number == _EVENT_NAME:
            name = plane.events.get(a, "")
        elif number == _OFFSET:
            offset = a
        elif number == _DURATION:
            duration = a
        elif number == _EVENT_STATS and kind == BYTES:
            key, value = _stat(data, plane, a, b)
            if isinstance(value, str):
                said[key] = value
    return XlaRun(name, base_us + offset / 1e6, duration / 1e6, operation_of(said))


def _stat(data: memoryview, plane: _Plane, start: int, end: int) -> tuple[str, int | str | None]:
    """Name and value of a statistic."""
    name, value = "", None
    found: int | str | None = value
    for number, kind, a, b in fields(data, start, end):
        if number == _STAT_ID and kind == VARINT:
            name = plane.stats.get(a, "")
        elif number in (_UNSIGNED, _SIGNED) and kind == VARINT:
            found = a
        elif number == _TEXT and kind == BYTES:
            found = bytes(data[a:b]).decode("utf-8", "replace")
        elif number == _REFERENCE and kind == VARINT:
            found = plane.stats.get(a)
    return name, found


def _facts(data: memoryview, plane: _Plane) -> DeviceFacts:
    said = dict(_stat(data, plane, *fact) for fact in plane.facts)

    def whole(name: str) -> int | None:
        value = said.get(name)
        return value if isinstance(value, int) else None

    major, minor = whole("compute_cap_major"), whole("compute_cap_minor")
    name = said.get("gpu_device_name") or said.get("device_name") or ""
    amd = str(said.get("device_vendor", "")).upper() == "AMD"
    return DeviceFacts(
        name=str(name) or ("AMD" if amd else ""),
        capability=None if major is None or minor is None else (major, minor),
        processors=whole("core_count"),
        memory_bytes=whole("memory_size"),
    )
