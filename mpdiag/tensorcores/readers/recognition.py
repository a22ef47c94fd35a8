"""Chooses the reader for a file by its first bytes, never by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.errors import DamagedTrace, InputError
from mpdiag.files.recognition import named_instead
from mpdiag.tensorcores.readers.ncu import NcuTrace
from mpdiag.tensorcores.readers.nsys import NsysTrace
from mpdiag.tensorcores.readers.nvprof import NvprofTrace
from mpdiag.tensorcores.readers.torch_trace import TorchTrace

if TYPE_CHECKING:
    import os

    from mpdiag.tensorcores.events import TraceReader

HEAD = 1 << 16
_PACKED = (b"PK\3\4", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"7z\xbc\xaf")
"""The first bytes of zip, zstd, xz, bzip2 and 7z files."""


def read(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace: of torch.profiler (plain or gzip), nsys (sqlite), ncu or nvprof (CSV).

    Raises:
        InputError: If there is no such file.
        DamagedTrace: If it is empty or of no known kind.
    """
    place = Path(path)
    if place.is_dir():
        message = f"{place} is a folder: name one of the traces in it"
        if (place / "meta.json").is_file():
            message = f"{place} is a run, not a trace: use mpdiag analyze {place}"
        raise InputError(message)
    if not place.is_file():
        message = f"there is no trace {place}: name a file of torch.profiler, nsys, ncu or nvprof"
        raise InputError(message)
    with place.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"SQLite format 3\0"):
        return NsysTrace(place)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    other = named_instead(place, "trace")
    if other is not None and place.suffix != ".py":
        raise DamagedTrace(other)
    if head.startswith(b"\x1f\x8b") or text[:1] in (b"{", b"["):
        return TorchTrace(place)
    if b"Kernel Name" in head or b"==PROF==" in head:
        return NcuTrace(place)
    if b"nvprof" in head.lower() or b"Profiling result" in head or b'"Name"' in head:
        return NvprofTrace(place)
    message = f"{place} {_what_it_is(place, head)}"
    raise DamagedTrace(message)


def _what_it_is(place: Path, head: bytes) -> str:
    """What a file that is not a trace seems to be, and what to do with it."""
    if not head.strip():
        return "is empty: record it again"
    if head.startswith(b"NVIDIA Nsight") or place.suffix in (".nsys-rep", ".qdrep"):
        return "is an nsys report: convert it with nsys export --type sqlite"
    if head.startswith(b"NVR\0") or place.suffix == ".ncu-rep":
        return "is an ncu report: convert it with ncu --import FILE --csv"
    if head.startswith(_PACKED):
        return "is compressed: unpack it first (only gzip is read directly)"
    if b"Total Time (ns)" in head and b"Instances" in head:
        return "is a summary by nsys stats: use the output of nsys export --type sqlite"
    if place.suffix == ".py":
        return f"is a script: to run and measure it, use mpdiag profile -- {place}"
    return "is not a trace of torch.profiler, nsys, ncu or nvprof"
