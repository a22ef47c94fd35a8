"""The trace of a few steps: values at fixed positions, norms, and how far a twin of the step came apart.

``trace/*.parquet`` has one row for each tensor that ``record --trace`` looked at, in the order of the
step: what went into the model, the parameters, what modules returned, every operation's results,
gradients. Positions follow from a tensor's shape alone, so that two recordings look at the same ones,
on any machine and in any version. docs/run-folder.md describes every column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mpdiag.files.arrow_columns import array_from, lists_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

TraceKind = Literal[
    "input", "weight", "output", "operation", "gradient", "weight_grad", "updated_weight"
]
"""``weight`` is before the step, ``updated_weight`` after it; ``gradient`` is an output's."""
STEPS = (0, 1)
"""Steps traced by default."""
_MOST = 64
_INSIDE = 8
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_WORDS = ("kind", "phase", "module", "name", "file", "code", "dtype", "operand_format")
_NEWER = ("reads", "operand_format")  # which traces did not always have


@dataclass(frozen=True, eq=False)
class TraceRow:
    """One tensor of a traced step.

    Attributes:
        step, rank, order: Where it stands; ``order`` counts the rows of a step.
        kind: What it is.
        phase: ``forward``, ``backward`` or ``update``.
        module: The module; None outside of all.
        name: The parameter's name, or the operation's as ATen has it; ``output 1`` of the second
            tensor that a module returns, and so on; else empty.
        call: Which tensor of this kind, module and name it is in the step, from 0.
        file, line, code: Where the user's code called the operation.
        shape: Sizes, of a distributed tensor those of the whole.
        dtype: Without ``torch.``.
        values: At ``positions(shape)``, float64.
        at: Which of these positions this rank holds, (k,); None for all.
        partial: Whether the values of all ranks add up to the tensor's.
        norm: ‖x‖₂ of what this rank holds.
        spread: How far a twin came apart here, of this step or, beside the size, of one before: the
            root mean square over the positions; None where that is not known.
        arguments: Of an operation: its arguments that are no tensors, as JSON.
        reads: The latest tensors, by ``order``, in the memory that the operation read, or that this is.
        operand_format: To which it may have rounded its FP32 operands: ``tf32`` or ``bf16``.
    """

    step: int
    rank: int
    order: int
    kind: TraceKind
    phase: str
    module: str | None
    name: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    values: NDArray[np.float64]
    norm: float
    at: NDArray[np.int32] | None = None
    partial: bool = False
    spread: float | None = None
    file: str = ""
    line: int = 0
    code: str = ""
    arguments: str = field(default="", repr=False)
    reads: tuple[int, ...] = ()
    operand_format: str = ""


@lru_cache(maxsize=4096)
def positions(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """At which elements a tensor of a shape is looked at: flat numbers in row-major order, (k,).

    Up to 8 elements of up to 8 rows of the first dimension, rows at equal distances and the same
    elements in each; of a vector up to 64 elements. So the rows that a rank holds of a batch are
    looked at in the same places as the whole batch.
    """
    rows, inside = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    across = min(inside, _INSIDE)
    down = min(rows, _MOST // max(across, 1))
    row = np.arange(down, dtype=np.int64) * rows // max(down, 1)
    if inside <= _INSIDE:
        column = np.arange(across, dtype=np.int64)
    else:  # multiples of the golden ratio lie in no lattice of heads or channels
        column = np.unique((np.arange(1, across + 1) * _GOLDEN % 1.0 * inside).astype(np.int64))
    return (row[:, None] * inside + column[None, :]).reshape(-1)


def schema() -> pa.Schema:
    """The Arrow schema of ``trace/*.parquet``, schema version 1."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    types = {
        **dict.fromkeys(("step", "order", "call", "line"), pa.int32()),
        **dict.fromkeys(_WORDS, word),
        "rank": pa.int16(),
        "shape": pa.list_(pa.int64()),
        "values": pa.list_(pa.float64()),
        "norm": pa.float64(),
        "at": pa.list_(pa.int32()),
        "partial": pa.bool_(),
        "spread": pa.float64(),
        "arguments": pa.string(),
        "reads": pa.list_(pa.int32()),
    }
    return pa.schema([(name, types[name]) for name in TraceRow.__dataclass_fields__])


def encode(rows: Iterable[TraceRow]) -> pa.Table:
    """Rows as an Arrow table with ``schema()``."""
    return table_of([vars(row) for row in rows])


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The same of rows by their attributes' names: objects of hundreds of rows take long to make."""
    import pyarrow as pa

    expected, columns = schema(), []
    for column in expected:
        values = [row[column.name] for row in rows]
        if column.name == "values":
            ends = np.cumsum([0, *map(len, values)])
            columns.append(lists_of(ends, np.concatenate([np.empty(0), *values])))
            continue
        if column.name == "at":
            values = [None if v is None else v.tolist() for v in values]
        columns.append(array_from(values, column.type))
    return pa.table(columns, schema=expected)


def decode(table: pa.Table) -> Iterator[TraceRow]:
    """The inverse of ``encode``.

    Raises:
        KeyError: If a column is missing.
        ValueError: If a column holds what it should not.
    """
    import pyarrow as pa

    for column in schema():
        if column.name in _NEWER and column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    for row in table.select(schema().names).cast(schema()).to_pylist():
        row["shape"], row["reads"] = tuple(row["shape"] or ()), tuple(row["reads"] or ())
        row["operand_format"] = row["operand_format"] or ""
        row["values"] = np.asarray(row["values"], np.float64)
        row["at"] = None if row["at"] is None else np.asarray(row["at"], np.int32)
        refuse_nonsense(row)
        yield TraceRow(**row)


def refuse_nonsense(row: dict[str, Any]) -> None:
    """Refuse what no recorder writes.

    Raises:
        ValueError: Naming the column.
    """
    optional = ("module", "at", "spread")
    wrong = next((k for k, v in row.items() if v is None and k not in optional), None)
    if wrong is None and row["kind"] not in get_args(TraceKind):
        wrong = "kind"
    if wrong is None and not all(n is not None and 0 <= n < 1 << 53 for n in row["shape"]):
        wrong = "shape"
    if wrong is None and (row["spread"] or 0.0) < 0.0:
        wrong = "spread"
    if wrong is None:
        held = positions(row["shape"]).size if row["at"] is None else row["at"].size
        beyond = row["at"] is not None and (row["at"] >= positions(row["shape"]).size).any()
        if held != row["values"].size or beyond:
            wrong = "values"
    if wrong is not None:
        raise ValueError(f"a trace's {wrong} holds a value that mpdiag never writes there")
