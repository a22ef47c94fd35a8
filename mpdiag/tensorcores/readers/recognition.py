"""Which reader a file needs: told by what it begins with, never by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.errors import DamagedTrace, InputError
from mpdiag.tensorcores.readers.ncu import NcuTrace
from mpdiag.tensorcores.readers.nsys import NsysTrace
from mpdiag.tensorcores.readers.nvprof import NvprofTrace
from mpdiag.tensorcores.readers.torch_trace import TorchTrace

if TYPE_CHECKING:
    import os

    from mpdiag.tensorcores.events import Trace

HEAD = 1 << 16


def read(path: str | os.PathLike[str]) -> Trace:
    """Open a trace: of torch.profiler (plain or gzip), nsys (sqlite), ncu or nvprof (CSV).

    Raises:
        InputError: If there is no such file.
        DamagedTrace: If it is empty, or nothing that is known.
    """
    place = Path(path)
    if not place.is_file():
        message = f"there is no trace {place}: give a file of torch.profiler, nsys, ncu or nvprof"
        raise InputError(message)
    with place.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"SQLite format 3\0"):
        return NsysTrace(place)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"\x1f\x8b") or text[:1] in (b"{", b"["):
        return TorchTrace(place)
    if b"Kernel Name" in head or b"==PROF==" in head:
        return NcuTrace(place)
    if b"nvprof" in head.lower() or b"Profiling result" in head or b'"Name"' in head:
        return NvprofTrace(place)
    if not head.strip():
        message = f"{place} is empty: record it again"
    elif head.startswith(b"NVIDIA Nsight") or place.suffix in (".nsys-rep", ".qdrep", ".ncu-rep"):
        message = f"{place} is a report: export it first, nsys export --type sqlite or ncu --csv"
    else:
        message = f"{place} is no trace of torch.profiler, nsys, ncu or nvprof"
    raise DamagedTrace(message)
