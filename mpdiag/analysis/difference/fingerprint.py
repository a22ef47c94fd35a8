"""``mpdiag fingerprint``: the first traced step of a run in one small file, for a repository.

It is a Parquet file with the columns of ``trace/*.parquet``, at fewer positions if need be. Its metadata
say what made it: the command, the versions, the device and the seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mpdiag.errors import DamagedRun, InputError
from mpdiag.files.paths import AnyPath
from mpdiag.runs.run import Run
from mpdiag.runs.trace import TraceRow, decode, encode, positions

LARGEST = 1_000_000
"""Bytes of the file."""
_KEY = b"mpdiag_fingerprint"
_CARRIED = ("created", "argv", "versions", "device", "seeds", "model", "world_size", "script")


def traced(run: Run) -> Sequence[TraceRow]:
    """The rows of a run's trace.

    Raises:
        InputError: If it has none.
    """
    if rows := run.trace():
        return rows
    steps = (run.meta.get("trace") or {}).get("steps")
    missed = f"{run.folder} recorded none of its steps {steps}: choose others with --trace-steps"
    none = f"{run.folder} has no trace: record it with mpdiag record --trace"
    raise InputError(missed if steps else none)


def fingerprint_bytes(run: Run) -> bytes:
    """The fingerprint of a run, as the content of a file.

    Raises:
        InputError: If the run has no trace, or too large a one.
    """
    rows = traced(run)
    made_by = {name: run.meta[name] for name in (*_CARRIED, "trace") if name in run.meta}
    first = [row for row in rows if row.step == rows[0].step]
    without = [row for row in first if row.kind != "operation"]
    for some in (first, without):
        for count in (64, 16, 4):
            table = encode(_thinned(row, count) for row in some)
            sink = pa.BufferOutputStream()
            metadata = {**(table.schema.metadata or {}), _KEY: json.dumps(made_by)}
            pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
            content: bytes = sink.getvalue().to_pybytes()
            if len(content) <= LARGEST:
                return content
    raise InputError(
        f"the trace of {run.folder} has {len(without):,} tensors, too many for a fingerprint: record "
        "fewer modules with --include"
    )


def read_fingerprint(path: AnyPath) -> tuple[Sequence[TraceRow], Mapping[str, Any]]:
    """The rows of a fingerprint, and what made it.

    Raises:
        DamagedRun: If the file is none.
        OSError: If it cannot be read.
    """
    content = path.read_bytes()
    try:
        table = pq.read_table(pa.BufferReader(content[: 16 * LARGEST]))
        made_by = json.loads(table.schema.metadata[_KEY])
        return list(decode(table)), made_by
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DamagedRun(f"{path} is no fingerprint: write one with mpdiag fingerprint") from error


def _thinned(row: TraceRow, count: int) -> TraceRow:
    """A row at fewer positions, which lie as far apart as they can."""
    at = np.arange(positions(row.shape).size, dtype=np.int32) if row.at is None else row.at
    if at.size <= count:
        return row
    kept = np.arange(count) * at.size // count
    kept += (np.arange(count) * 5) % max(1, at.size // count)  # not the first element of each row
    return replace(row, at=at[kept], values=row.values[kept])
