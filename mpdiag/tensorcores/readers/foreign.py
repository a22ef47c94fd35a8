"""What a file that is no trace seems to be, and what to do with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PACKED = (b"PK\3\4", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"7z\xbc\xaf")
"""The first bytes of zip, zstd, xz, bzip2 and 7z files."""
_STACKS = re.compile(rb"\A(?:[^;\r\n]+(?:;[^;\r\n]+)+ \d+\r?\n){2}")
_CHROME = "write the trace with export_chrome_trace"
_NSYS = "use nsys stats --report cuda_gpu_kern_sum --format csv, or nsys export --type sqlite"
_ROCPROF = "give its kernel_trace.csv (rocprofv3 --kernel-trace --output-format csv)"

_TEXTS = (
    (
        re.compile(rb"Self C(?:PU|UDA) %"),
        f"is a table printed by key_averages(), which has no single kernels: {_CHROME}",
    ),
    (_STACKS, f"is the output of export_stacks, which has no kernels: {_CHROME}"),
    (re.compile(rb"Num Calls"), f"is a summary of API calls by nsys stats: {_NSYS}"),
    (re.compile(rb"Total Time \(ns\)"), f"is a summary by nsys stats: {_NSYS}"),
    (re.compile(rb'"?Domain"?,"?Function"?'), f"is a trace of API calls by rocprof: {_ROCPROF}"),
    (re.compile(rb'"?Kind"?,"?Direction"?'), f"is a trace of copies by rocprofv3: {_ROCPROF}"),
    (re.compile(rb'"Agent_Type"'), f"is a list of devices by rocprofv3: {_ROCPROF}"),
    (
        re.compile(rb'"?Invocations"?,"?Metric Name"?'),
        "is a table of nvprof's metrics, which has no times: record with nvprof --csv",
    ),
    (
        re.compile(rb'"?Address"?,"?Source"?'),
        "is the source page of ncu: export the raw page with ncu --import FILE --page raw --csv",
    ),
)
"""What is in a text, and what the text then is; the first that fits."""


def what_it_is(place: Path, head: bytes, *, packed: bool = False) -> str:
    """The end of a sentence that begins with the file's path.

    Args:
        place: The file.
        head: Its beginning, unpacked.
        packed: Whether it is a gzip file.
    """
    if not head.strip():
        return "is damaged: it cannot be unpacked" if packed else "is empty: record it again"
    if head.startswith(b"NVIDIA Nsight") or place.suffix in (".nsys-rep", ".qdrep"):
        return "is an nsys report: convert it with nsys export --type sqlite"
    if head.startswith(b"NVR\0") or place.suffix == ".ncu-rep":
        return "is an ncu report: convert it with ncu --import FILE --csv"
    if head.startswith((*_PACKED, b"SQLite format 3\0")):
        return "is compressed: unpack it first (only gzip is read directly)"
    if place.suffix in (".pftrace", ".perfetto-trace"):
        return "is a trace for Perfetto: record with rocprofv3 --output-format json"
    if place.suffix == ".py":
        return f"is a script: to run and measure it, use mpdiag profile -- {place}"
    for pattern, words in _TEXTS:
        if pattern.search(head):
            return words
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return (
            "is JSON but no trace: name the file that export_chrome_trace wrote, or that of "
            "rocprofv3 --output-format json"
        )
    return "is not a trace of torch.profiler, JAX, nsys, ncu, nvprof, rocprofv3 or rocprof"
