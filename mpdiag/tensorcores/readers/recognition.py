"""Chooses the reader for a file by its beginning, never by its name.

At most ``SEARCHED`` bytes are read for it, so that a file of another kind is refused at once, however
large it is.
"""

import gzip
import os
import re
from collections.abc import Iterator
from functools import cache
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import cast

from mpdiag.errors import DamagedTrace, InputError
from mpdiag.files.recognition import named_instead, run_instead
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.events import TraceReader
from mpdiag.tensorcores.readers import kernel_table, ncu
from mpdiag.tensorcores.readers.kernel_table import (
    PRINTED,
    KernelTableTrace,
    NvprofSummary,
    NvprofTrace,
)
from mpdiag.tensorcores.readers.ncu import NcuTrace
from mpdiag.tensorcores.readers.nsys import NsysTrace
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
        raise InputError(f"there is no trace {place}: name a file of {_PROGRAMS}")
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
        raise DamagedTrace(f"{place} {_what_it_is(place, head, packed=packed)}")
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
    other = (row["pattern"].encode() for row in _not_read() if row["where"] == "json")
    if any(re.search(pattern, text) for pattern in other):
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
            if kernel_table.is_nvprof_header(row):
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


_NCU_PRINTED = re.compile(r"Context \d+, Stream \d+")


@cache
def _not_read() -> list[dict[str, str]]:
    """What tells files of other kinds, and what each then is; the first row that fits counts."""
    return read_table(Path(__file__).with_name("not_read.tsv"))


def _what_it_is(place: Path, head: bytes, *, packed: bool = False) -> str:
    """The end of a sentence that begins with the file's path, by its unpacked beginning."""
    if not head.strip():
        return "is damaged: it cannot be unpacked" if packed else "is empty: record it again"
    for row in _not_read():
        text = place.name.encode() if row["where"] == "name" else head
        find = re.match if row["where"] == "begin" else re.search
        if find(row["pattern"].encode(), text):
            return row["words"].replace("{file}", str(place))
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return (
            "is JSON but no trace: name the file that export_chrome_trace wrote, or that of "
            "rocprofv3 --output-format json"
        )
    return f"is not a trace of {_PROGRAMS}"
