"""The rows of a recording, one for each step × tensor, on their way to the disk.

The same rows have three shapes:

* a stack of histograms with labels: what a recorder hands to ``encode``;
* an Arrow table with ``schema()``: what lies in a Parquet part, readable without this package;
* ``records.Records``: numpy columns, which the analysis reads and merges into histograms.

docs/run-folder.md describes every column. A histogram is stored from its first to its last occupied bin:
``counts[i]`` values lie in (2^(first_exponent+i), 2^(first_exponent+i+1)], and byte i of ``means``
says their mean, 2^(first_exponent+i) * (1 + byte / 255).

What a histogram does not say of a format is counted for that format, and stands in the map
``formats`` by the format's name: one row, one histogram, any number of formats.

Schema 1 had columns ``fp16_overflow``, ``swallowed_fp16``, ``swallowed_bf16`` and ``vanished_fp16``
in place of the map; ``upgraded`` turns its tables into today's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpdiag.files.arrow_columns import array_from, array_of, lists_of, numbers
from mpdiag.numerics.formats import BF16, FP16

if TYPE_CHECKING:
    import pyarrow as pa

    from mpdiag.numerics.histograms import ExponentHistogram

Kind = Literal["activation", "activation_grad", "weight", "weight_grad", "update"]
KINDS: tuple[Kind, ...] = ("activation", "activation_grad", "weight", "weight_grad", "update")

TOTAL = -1
"""``micro`` of a row that speaks of the whole step, not of one micro-batch of it."""

Placement = Literal["local", "sharded", "replicated"]
"""How a tensor lies over the ranks: each rank has its own (``local``, rows add up), a part of one
tensor (``sharded``, rows add up), or a copy of the same (``replicated``, one rank's row counts)."""

Stage = Literal["local", "reduced"]
"""Before or after the reduction of gradients over the ranks (weights and updates: ``reduced``)."""

TEXT = ("kind", "name", "dtype", "placement", "stage")
INTEGERS = {
    "step": "int32",
    "micro": "int16",
    "rank": "int16",
    "tensors": "int32",
    "numel": "int64",
    "zeros": "int64",
    "subnormals": "int64",
    "infs": "int64",
    "nans": "int64",
    "first_exponent": "int16",
}
FLOATS = ("scale", "absmax", "absmin")
# Of updates alone; null in every other row.
UPDATE_INTEGERS = {"changed": "int64", "ratio_zeros": "int64", "ratio_first_exponent": "int16"}

SAMPLED = "sampled_from"
"""Of updates that were counted for some elements alone: how many the parameter has. Null otherwise,
and in runs of before this column."""

_UNLIKE = ("absmax", "absmin", "means", "formats")
"""Columns whose values hardly repeat, or so simply that a dictionary takes more than it saves."""

FormatFact = Literal["overflow", "swallowed", "vanished"]
FACTS: tuple[FormatFact, ...] = ("overflow", "swallowed", "vanished")
"""What is counted for a format: finite values that overflow in it; of the elements that an update
changed, those that a weight in it would not have taken, and those whose update is 0 in it."""
UPDATE_FACTS: tuple[tuple[FormatFact, str] | str, ...] = (
    "changed",
    ("swallowed", FP16.name),
    ("swallowed", BF16.name),
    ("vanished", FP16.name),
    "ratio_zeros",
)
"""What the counters say of an update, in their order: a column, or a fact of a format."""
EARLIER: dict[str, tuple[FormatFact, str]] = {
    "fp16_overflow": ("overflow", FP16.name),
    "swallowed_fp16": ("swallowed", FP16.name),
    "swallowed_bf16": ("swallowed", BF16.name),
    "vanished_fp16": ("vanished", FP16.name),
}
"""The columns of schema 1 that each held a fact of a format."""


@cache
def schema() -> pa.Schema:
    """The Arrow schema of ``stats/*.parquet``, schema version 2."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    integer = {"int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64()}
    columns: list[tuple[str, Any]] = []
    columns += [(name, integer[kind]) for name, kind in INTEGERS.items()]
    columns += [(name, text) for name in TEXT]
    columns += [(name, pa.float64()) for name in FLOATS]
    columns += [("skipped", pa.bool_())]
    columns += [("counts", pa.list_(pa.int64())), ("means", pa.binary())]
    columns += [("formats", pa.map_(pa.string(), pa.struct([(f, pa.int64()) for f in FACTS])))]
    columns += [(name, integer[kind]) for name, kind in UPDATE_INTEGERS.items()]
    columns += [("ratio_counts", pa.list_(pa.int64())), (SAMPLED, pa.int64())]
    return pa.schema(columns)


@dataclass(frozen=True, eq=False)
class UpdateStack:
    """What m weight updates did, as columns.

    Attributes:
        rows: int64 (m,), the row each one belongs to.
        facts: int64 (m, 5): what ``UPDATE_FACTS`` names, in that order.
        ratio_first: Exponent of the first column of ``ratios``.
        ratios: int64 (m, bins).
    """

    rows: NDArray[np.int64]
    facts: NDArray[np.int64]
    ratio_first: int
    ratios: NDArray[np.int64]


def encode(
    histograms: ExponentHistogram, labels: Mapping[str, Any], updates: UpdateStack | None = None
) -> pa.Table:
    """Rows as an Arrow table with ``schema()``.

    Args:
        histograms: A stack of batch shape (n,).
        labels: The columns a histogram does not say, each a sequence of length n: step, micro,
            rank, tensors, kind, name, dtype, placement, stage, scale, skipped; sampled_from where
            an update was counted for some elements.
        updates: For the rows of kind ``update``.
    """
    import pyarrow as pa

    h, n = histograms, len(histograms.zeros)
    some = np.flatnonzero(h.counts.any(0))  # rows of a step span a few of FP32's powers of two
    span = slice(some[0], some[-1] + 1) if len(some) else slice(0, 1)
    counts, first = h.counts[:, span], h.first + span.start
    start, offsets, flat = _trimmed(counts)
    exponents = first + np.arange(counts.shape[1], dtype=np.float64)
    means = h.sums[:, span] / np.maximum(counts, 1) / np.exp2(exponents)
    codes = np.rint((np.clip(means, 1.0, 2.0) - 1.0) * 255.0) * (counts > 0)
    columns: dict[str, Any] = {SAMPLED: pa.nulls(n, pa.int64()), **labels}
    for name in ("zeros", "subnormals", "infs", "nans", "absmax", "absmin"):
        columns[name] = getattr(h, name)
    columns["numel"] = h.numel
    columns["first_exponent"] = np.where(np.diff(offsets) > 0, first + start, 0)
    columns["counts"] = lists_of(offsets, counts.reshape(-1)[flat].astype(np.int64))
    columns["means"] = _binary_array(offsets, codes.reshape(-1)[flat].astype(np.uint8))
    columns |= _update_columns(n, updates)
    columns["formats"] = _formats_array(h.fp16_overflow, updates)
    expected = schema()
    arrays = []
    for field in expected:
        values = columns[field.name]
        if isinstance(values, pa.Array):
            arrays.append(values)
        elif isinstance(values, np.ndarray) and field.name not in TEXT:
            arrays.append(array_of(values.astype(field.type.to_pandas_dtype())))
        else:
            arrays.append(array_from(values, field.type))
    return pa.table(arrays, schema=expected)


def _trimmed(
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each row (n, bins) is occupied: its first bin, offsets (n + 1), flat positions."""
    n, bins = counts.shape
    occupied = counts > 0
    some = occupied.any(1)
    start = np.where(some, occupied.argmax(1), 0)
    stop = np.where(some, bins - occupied[:, ::-1].argmax(1), 0)
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    flat = np.repeat(np.arange(n) * bins + start - offsets[:-1], stop - start)
    return start, offsets, flat + np.arange(offsets[-1])


def _binary_array(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> Any:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _update_columns(n: int, updates: UpdateStack | None) -> dict[str, Any]:
    """The columns of updates for n rows, null where a row is none."""
    if updates is None:
        none = np.zeros((0, len(UPDATE_FACTS)), np.int64)
        updates = UpdateStack(np.zeros(0, np.int64), none, 0, np.zeros((0, 1), np.int64))
    order = np.argsort(updates.rows, kind="stable")
    rows, ratios = updates.rows[order], updates.ratios[order]
    absent = np.ones(n, bool)
    absent[rows] = False
    start, offsets, flat = _trimmed(ratios)
    known = dict(zip(UPDATE_FACTS, updates.facts[order].T, strict=True))
    known["ratio_first_exponent"] = updates.ratio_first + start
    columns: dict[str, Any] = {}
    for name, kind in UPDATE_INTEGERS.items():
        values = np.zeros(n, kind)
        values[rows] = known[name]
        columns[name] = array_of(values, mask=absent)
    lengths = np.zeros(n, np.int64)
    lengths[rows] = np.diff(offsets)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    counts = ratios.reshape(-1)[flat].astype(np.int64)
    columns["ratio_counts"] = lists_of(ends, counts, mask=absent)
    return columns


_Columns = dict[tuple[str, str], "NDArray[np.int64]"]
"""By fact and format; -1 where it is not known."""


def _formats_array(overflow: NDArray[np.int64], updates: UpdateStack | None) -> Any:
    """The column ``formats`` of n rows: FP16's overflow in each, and the facts of updates."""
    columns: _Columns = {("overflow", FP16.name): overflow}
    if updates is not None:
        for what, values in zip(UPDATE_FACTS, updates.facts.T, strict=True):
            if not isinstance(what, str):
                columns[what] = np.full(len(overflow), -1)
                columns[what][updates.rows] = values
    return _map_array(columns, len(overflow))


def _map_array(columns: _Columns, n: int) -> Any:
    """A map of n rows from formats to their facts; a format of which a row knows none is left out."""
    import pyarrow as pa

    names = list(dict.fromkeys(fmt for _, fmt in columns))
    none = np.full(n, -1)
    facts = np.stack([[columns.get((fact, fmt), none) for fmt in names] for fact in FACTS])
    facts = facts.transpose(2, 1, 0)  # row, format, fact
    known = (facts >= 0).any(-1)
    values = facts[known]
    offsets = np.concatenate([[0], np.cumsum(known.sum(1))])
    codes = np.broadcast_to(np.arange(len(names), dtype=np.int32), known.shape)[known]
    words = array_from(names, pa.string())
    keys = pa.DictionaryArray.from_arrays(array_of(codes), words).dictionary_decode()
    items = pa.StructArray.from_arrays(
        [array_of(column, mask=column < 0) for column in values.T], list(FACTS)
    )
    return pa.MapArray.from_arrays(array_of(offsets.astype(np.int32)), keys, items)


@cache
def encodings() -> dict[str, Any]:
    """Options of ``pyarrow.parquet.write_table`` by which this schema's tables are small.

    Counts of bins agree in their upper bytes, so those are kept together: a quarter less on disk
    than with a dictionary. What does not repeat has none.
    """
    names = (str(name) for name in schema().names)
    counts = ("counts.list.element", "ratio_counts.list.element")
    return {
        "use_dictionary": [name for name in names if name not in _UNLIKE],
        "column_encoding": dict.fromkeys(counts, "BYTE_STREAM_SPLIT"),
    }


def upgraded(table: pa.Table) -> pa.Table:
    """A table of any earlier schema as one of today's; columns that were not read stay away."""
    import pyarrow as pa

    if SAMPLED not in table.column_names:
        table = table.append_column(SAMPLED, pa.nulls(len(table), pa.int64()))
    earlier = [name for name in EARLIER if name in table.column_names]
    if not earlier:
        return table
    columns: _Columns = {
        EARLIER[name]: numbers(table.column(name), np.int64, -1) for name in earlier
    }
    formats = _map_array(columns, len(table))
    return table.drop_columns(earlier).append_column("formats", formats)


def columns_of(present: Iterable[str]) -> list[str]:
    """The columns that a part needs to have, given those it has: today's, or schema 1's."""
    present = set(present)
    names: list[str] = [n for n in schema().names if n != SAMPLED or SAMPLED in present]
    if present.isdisjoint(EARLIER):
        return names
    return [*(name for name in names if name != "formats"), *EARLIER]
