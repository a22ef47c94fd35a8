"""``mpdiag fingerprint``: the first traced step of a run in one small file, for a repository.

It has what ``diff`` reads of a run, at fewer positions, and what made it: the command, the versions, the
device and the seed. So a later run is compared with it as with the run itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpdiag.analysis.difference.tolerance import FACTOR
from mpdiag.errors import DamagedRun, InputError, NewerSchema
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath
from mpdiag.runs.run import Run
from mpdiag.runs.trace import TraceRow, positions, refuse_nonsense

SCHEMA_VERSION = 1
KEY = "mpdiag_fingerprint"
LARGEST = 1_000_000
"""Bytes of the file."""
_POSITIONS = (16, 8, 4)
_CARRIED = ("created", "argv", "versions", "device", "seeds", "model", "world_size", "script")
_DEFAULTS = {
    "rank": 0,
    "module": None,
    "name": "",
    "call": 0,
    "at": None,
    "partial": False,
    "spread": None,
    "file": "",
    "line": 0,
    "code": "",
    "arguments": "",
}
"""What a row leaves out."""


def fingerprint_text(run: Run) -> str:
    """The fingerprint of a run, as the text of a JSON file.

    Raises:
        InputError: If the run has no trace, or too large a one.
    """
    rows = run.trace()
    if not rows:
        raise InputError(f"{run.folder} has no trace: record it with mpdiag record --trace")
    first = [row for row in rows if row.step == rows[0].step]
    head = {
        KEY: SCHEMA_VERSION,
        "tolerance_factor": FACTOR,
        "made_by": {name: run.meta[name] for name in _CARRIED if name in run.meta},
    }
    without = [row for row in first if row.kind != "operation"]
    for count, some in [*((n, first) for n in _POSITIONS), *((n, without) for n in _POSITIONS)]:
        lines = ",\n".join(json.dumps(_written(_thinned(row, count))) for row in some)
        text = json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n'
        if len(text) <= LARGEST:
            return text
    raise InputError(
        f"the trace of {run.folder} has {len(without):,} tensors, too many for a fingerprint: record "
        "fewer modules with --include"
    )


def read_fingerprint(path: AnyPath) -> tuple[list[TraceRow], Mapping[str, Any]]:
    """The rows of a fingerprint, and what made it.

    Raises:
        DamagedRun: If the file is none.
        NewerSchema: If a newer version wrote it.
        OSError: If it cannot be read.
    """
    try:
        document = read_document(path)
        if document[KEY] > SCHEMA_VERSION:
            raise NewerSchema(f"{path} was written by a newer version of mpdiag: upgrade mpdiag")
        return [_read(row) for row in document["rows"]], document["made_by"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRun(f"{path} is no fingerprint: write one with mpdiag fingerprint") from error


def _thinned(row: TraceRow, count: int) -> TraceRow:
    """A row at fewer positions, which lie as far apart as they can."""
    at = np.arange(positions(row.shape).size, dtype=np.int32) if row.at is None else row.at
    if at.size <= count:
        return row
    kept = np.arange(count) * at.size // count
    kept += (np.arange(count) * 5) % max(1, at.size // count)  # not the first element of each row
    return replace(row, at=at[kept], values=row.values[kept])


def _written(row: TraceRow) -> dict[str, Any]:
    found = {k: v for k, v in vars(row).items() if k not in _DEFAULTS or v is not _DEFAULTS[k]}
    digits = 17 if row.dtype == "float64" else 9
    found["values"] = [_number(v, digits) for v in row.values.tolist()]
    found["norm"] = _number(row.norm, 9)
    if row.spread is not None:
        found["spread"] = _number(row.spread, 3)
    if row.at is not None:
        found["at"] = row.at.tolist()
    return {k: v for k, v in found.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}


def _number(value: float, digits: int) -> float | str:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _read(row: Mapping[str, Any]) -> TraceRow:
    known: dict[str, Any] = {**_DEFAULTS, **row}
    known["shape"] = tuple(known["shape"])
    values = np.array(list(map(float, known["values"])), np.float64)
    # Nine digits are those of one FP32 number, which holds narrower ones, too.
    narrow = known["dtype"] in ("float32", "bfloat16", "float16")
    known["values"] = values.astype(np.float32).astype(np.float64) if narrow else values
    known["norm"] = float(known["norm"])
    known["spread"] = None if known["spread"] is None else float(known["spread"])
    known["at"] = None if known["at"] is None else np.array(known["at"], np.int32)
    refuse_nonsense(known)
    return TraceRow(**known)
