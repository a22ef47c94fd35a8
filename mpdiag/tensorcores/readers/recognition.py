"""Chooses the reader for a file by its beginning, never by its name.

At most ``SEARCHED`` bytes are read for it, so that a file of another kind is refused at once, however
large it is.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import cast

from mpdiag.errors import DamagedTrace, InputError
from mpdiag.files.recognition import named_instead, run_instead
from mpdiag.tensorcores.events import TraceReader
from mpdiag.tensorcores.readers import kernel_table, ncu, nvprof
from mpdiag.tensorcores.readers.kernel_table import KernelTableTrace
from mpdiag.tensorcores.readers.ncu import NcuTrace
from mpdiag.tensorcores.readers.nsys import NsysTrace
from mpdiag.tensorcores.readers.nvprof import PRINTED, NvprofSummary, NvprofTrace
from mpdiag.tensorcores.readers.rocprof_json import ROOT, RocprofJsonTrace
from mpdiag.tensorcores.readers.tables import DELIMITERS, GZIP, encoding, parsed
from mpdiag.tensorcores.readers.torch_trace import TorchTrace

HEAD = 1 << 16
"""Bytes that tell most kinds of file."""
TABLE = 1 << 20
"""Bytes within which the header of a table must be."""
CANDIDATES = 2000
"""Lines of a head that may be the header of a table; a program may have printed some before it."""
LONGEST_HEADER = 1 << 17
"""Characters of the longest header: ncu's raw page has thousands of columns."""
SEARCHED = 1 << 25
"""Bytes within which the events of a JSON document must begin."""
_SQLITE = b"SQLite format 3\0"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_PROGRAMS = "torch.profiler, nsys, ncu, nvprof or rocprofv3"


def read(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace of torch.profiler, nsys, ncu, nvprof or rocprofv3.

    Raises:
        InputError: If there is no such file.
        DamagedTrace: If it is empty or of no known kind.
    """
    place = Path(path)
    if place.is_dir():
        message = f"{place} is a folder: name one of the traces in it"
        if (place / "meta.json").is_file():
            message = run_instead(place, "trace")
        raise InputError(message)
    if not place.is_file():
        message = f"there is no trace {place}: name a file of {_PROGRAMS}"
        raise InputError(message)
    with place.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        raw = cast("BufferedReader", gzip.GzipFile(fileobj=file)) if packed else file
        head = _portion(raw, HEAD)
        if head.startswith(_SQLITE) and not packed:
            return NsysTrace(place)
        other = named_instead(place, "trace")
        if other is not None and place.suffix != ".py":
            raise DamagedTrace(other)
        reader = _by_content(place, head, raw)
    if reader is None:
        message = f"{place} {_what_it_is(place, head, packed=packed)}"
        raise DamagedTrace(message)
    return reader


def _portion(file: BufferedReader, size: int) -> bytes:
    """The next bytes of a file; fewer where a compressed one is damaged."""
    pieces: list[bytes] = []
    try:
        while size > 0 and (piece := file.read1(min(size, 1 << 18))):
            pieces.append(piece)
            size -= len(piece)
    except Exception as error:  # zlib.error is not an OSError
        if not isinstance(error, OSError | EOFError) and type(error).__name__ != "error":
            raise
    return b"".join(pieces)


def _by_content(place: Path, head: bytes, rest: BufferedReader) -> TraceReader | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        found = _json(place, text, rest)
        if found is not None or text[:1] == b"{":
            return found
    head += _portion(rest, TABLE - len(head))
    return _table(place, head.decode(encoding(head), "replace"))


def _json(place: Path, text: bytes, rest: BufferedReader) -> TraceReader | None:
    if any(pattern.search(text) for pattern, _ in _OTHER_JSON):
        return None
    if f'"{ROOT}"'.encode() in text:
        return RocprofJsonTrace(place)
    if _EVENTS.search(text) or (text.startswith(b"[") and b'"ph"' in text):
        return TorchTrace(place)
    searched = len(text)
    while searched < SEARCHED and (more := _portion(rest, TABLE)):
        text = text[-64:] + more
        if _EVENTS.search(text):
            return TorchTrace(place)
        searched += len(more)
    return None


def _table(place: Path, text: str) -> TraceReader | None:
    for delimiter in DELIMITERS:
        for row in parsed(_headers(text), delimiter):
            if ncu.is_header(row):
                return NcuTrace(place, delimiter)
            at = kernel_table.columns(row)
            if at is not None:
                return KernelTableTrace(place, at.source, delimiter)
            if nvprof.is_header(row):
                return NvprofTrace(place, delimiter)
    if PRINTED.search(text):
        return NvprofSummary(place)
    return NcuTrace(place) if "==PROF==" in text and not _NCU_PRINTED.search(text) else None


def _headers(text: str) -> Iterator[str]:
    """Lines that may be the header of a table."""
    likely = (
        line
        for line in text.splitlines(keepends=True)
        if len(line) < LONGEST_HEADER and ("ame" in line or "peration" in line)
    )
    yield from islice(likely, CANDIDATES)


# -- what is not read ------------------------------------------------------------------------------


_STACKS = re.compile(rb"\A(?:[^;\r\n]+(?:;[^;\r\n]+)+ \d+\r?\n){2}")
_CHROME = "write the trace with export_chrome_trace"
_NSYS = "use nsys stats --report cuda_gpu_kern_sum --format csv, or nsys export --type sqlite"
_ROCPROF = "give its kernel_trace.csv (rocprofv3 --kernel-trace --output-format csv)"
_ROCPROFV3 = "record with rocprofv3 --kernel-trace --output-format csv"
_NCU_PRINTED = re.compile(r"Context \d+, Stream \d+")
_XLA = (
    "is a profile of JAX or TensorFlow, which is not read: record the program with nsys profile "
    "--trace=cuda, then nsys export --type sqlite"
)
_FILES: tuple[tuple[tuple[bytes, ...], tuple[str, ...], str], ...] = (
    (
        (b"NVIDIA Nsight",),
        (".nsys-rep", ".qdrep"),
        "is an nsys report: convert it with nsys export --type sqlite",
    ),
    ((b"NVR\0",), (".ncu-rep",), "is an ncu report: convert it with ncu --import FILE --csv"),
    (
        (
            b"PK\3\4",
            b"\x28\xb5\x2f\xfd",
            b"\xfd7zXZ\0",
            b"BZh",
            b"7z\xbc\xaf",
            b"SQLite format 3\0",
        ),
        (),
        "is compressed: unpack it first (only gzip is read directly)",
    ),
    ((), (".xplane.pb", ".xplane.pb.gz"), _XLA),
    (
        (),
        (".pftrace", ".perfetto-trace"),
        "is a trace for Perfetto: record with rocprofv3 --output-format json",
    ),
)
"""How a file begins, how its name ends, and what it then is; a database here is one in gzip."""
_OTHER_JSON = (
    (re.compile(rb'"name"\s*:\s*"/device:(?:GPU|TPU):\d'), _XLA),
    (
        re.compile(rb'"name"\s*:\s*"(?:\d+ )?GPU\d+"'),
        f"is a trace of rocprof, which is not read: {_ROCPROFV3}",
    ),
    (
        re.compile(rb'\A\s*\{"data"\s*:\s*\[|"(?:CudaEvent|TraceProcessEvent)"\s*:'),
        "is an nsys export in JSON lines, which is not read: use nsys export --type sqlite",
    ),
)
"""What is in JSON of other programs, and what it then is."""
_TEXTS = (
    *_OTHER_JSON,
    (re.compile(rb"\A\n[^\n]{0,400}/(?:device:|host:CPU)"), _XLA),
    (
        re.compile(rb"kernel_?name[^\n]*gpu[-_]id|gpu[-_]id[^\n]*kernel_?name", re.IGNORECASE),
        f"is a table of rocprof or rocprofiler-compute, which is not read: {_ROCPROFV3}",
    ),
    (
        re.compile(_NCU_PRINTED.pattern.encode()),
        "is what ncu prints, which is not read: use ncu --import FILE --csv, or record with ncu --csv",
    ),
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


def _what_it_is(place: Path, head: bytes, *, packed: bool = False) -> str:
    """The end of a sentence that begins with the file's path.

    Args:
        place: The file.
        head: Its beginning, unpacked.
        packed: Whether it is a gzip file.
    """
    if not head.strip():
        return "is damaged: it cannot be unpacked" if packed else "is empty: record it again"
    for beginnings, endings, words in _FILES:
        if head.startswith(beginnings) or place.name.endswith(endings):
            return words
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
    return f"is not a trace of {_PROGRAMS}"
