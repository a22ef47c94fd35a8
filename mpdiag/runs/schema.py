"""The rows of a recording, one for each step × tensor, on their way to the disk.

Three shapes of the same rows, and the ways between them:

* a stack of histograms with labels: what a recorder hands to ``encode``;
* an Arrow table with ``schema()``: what lies in a Parquet part, readable without this package;
* ``columns.Records``: numpy columns, which the analysis reads and merges into histograms.

The README describes every column. A histogram is stored from its first to its last occupied bin:
``counts[i]`` values lie in (2^(first_exponent+i), 2^(first_exponent+i+1)], and byte i of ``means``
says their mean, 2^(first_exponent+i) * (1 + byte / 255).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mpdiag.numerics.histograms import ExponentHistogram, stack

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

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
    "fp16_overflow": "int64",
    "first_exponent": "int16",
}
FLOATS = ("scale", "absmax", "absmin")
# Of updates alone; null in every other row.
UPDATE_INTEGERS = {
    "changed": "int64",
    "swallowed_fp16": "int64",
    "swallowed_bf16": "int64",
    "vanished_fp16": "int64",
    "ratio_zeros": "int64",
    "ratio_first_exponent": "int16",
}


def schema() -> pa.Schema:
    """The Arrow schema of ``stats/*.parquet``, schema version 1."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    integer = {"int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64()}
    columns: list[tuple[str, Any]] = []
    columns += [(name, integer[kind]) for name, kind in INTEGERS.items()]
    columns += [(name, text) for name in TEXT]
    columns += [(name, pa.float64()) for name in FLOATS]
    columns += [("skipped", pa.bool_())]
    columns += [("counts", pa.list_(pa.int64())), ("means", pa.binary())]
    columns += [(name, integer[kind]) for name, kind in UPDATE_INTEGERS.items()]
    columns += [("ratio_counts", pa.list_(pa.int64()))]
    return pa.schema(columns)


@dataclass(frozen=True)
class UpdateCounts:
    """What one weight update did, beside the histogram of |Δw|.

    Attributes:
        changed: Elements with Δw ≠ 0 in FP32.
        swallowed_fp16: Changed elements with fp16(w16 + fp16(Δw)) = w16, where w16 = fp16(w).
        swallowed_bf16: The same for BF16.
        vanished_fp16: Changed elements with fp16(Δw) = 0; each is swallowed, too.
        ratio_zeros: Changed elements with w = 0, whose ratio |w|/|Δw| is 0.
        ratio_first_exponent: Exponent of the first bin of ``ratio_counts``.
        ratio_counts: Changed elements by |w|/|Δw| in (2^e, 2^(e+1)].
    """

    changed: int
    swallowed_fp16: int
    swallowed_bf16: int
    vanished_fp16: int
    ratio_zeros: int
    ratio_first_exponent: int
    ratio_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class UpdateStack:
    """What m weight updates did, as columns.

    Attributes:
        rows: int64 (m,), the row each one belongs to.
        facts: int64 (m, 5): ``UpdateCounts``' first five figures, in their order.
        ratio_first: Exponent of the first column of ``ratios``.
        ratios: int64 (m, bins).
    """

    rows: NDArray[np.int64]
    facts: NDArray[np.int64]
    ratio_first: int
    ratios: NDArray[np.int64]


def encode(
    histograms: ExponentHistogram,
    labels: Mapping[str, Any],
    updates: UpdateStack | None = None,
) -> pa.Table:
    """Rows as an Arrow table with ``schema()``.

    Args:
        histograms: A stack of batch shape (n,).
        labels: The columns a histogram does not say, each a sequence of length n: step, micro,
            rank, tensors, kind, name, dtype, placement, stage, scale, skipped.
        updates: For the rows of kind ``update``.
    """
    import pyarrow as pa

    h, n = histograms, len(histograms.zeros)
    start, offsets, flat = _trimmed(h.counts)
    exponents = h.first + np.arange(h.counts.shape[1], dtype=np.float64)
    means = h.sums / np.maximum(h.counts, 1) / np.exp2(exponents)
    codes = np.rint((np.clip(means, 1.0, 2.0) - 1.0) * 255.0) * (h.counts > 0)
    columns: dict[str, Any] = dict(labels)
    for name in ("zeros", "subnormals", "infs", "nans", "fp16_overflow", "absmax", "absmin"):
        columns[name] = getattr(h, name)
    columns["numel"] = h.numel
    columns["first_exponent"] = np.where(np.diff(offsets) > 0, h.first + start, 0)
    columns["counts"] = _list_array(offsets, h.counts.reshape(-1)[flat])
    columns["means"] = _binary_array(offsets, codes.reshape(-1)[flat].astype(np.uint8))
    columns |= _update_columns(n, updates)
    expected = schema()
    arrays = []
    for field in expected:
        values = columns[field.name]
        if field.name in TEXT:
            arrays.append(pa.array(values, pa.string()).dictionary_encode())
        elif isinstance(values, pa.Array):
            arrays.append(values)
        else:
            arrays.append(pa.array(values, field.type))
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


def _list_array(offsets: NDArray[np.int64], values: NDArray[np.int64], mask: Any = None) -> Any:
    import pyarrow as pa

    nulls = None if mask is None else pa.array(mask)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values, pa.int64()), mask=nulls
    )


def _binary_array(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> Any:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _update_columns(n: int, updates: UpdateStack | None) -> dict[str, Any]:
    """The columns of updates for n rows, null where a row is none."""
    import pyarrow as pa

    types = schema()
    absent = np.ones(n, bool)
    if updates is None:
        columns: dict[str, Any] = {
            name: pa.nulls(n, types.field(name).type) for name in UPDATE_INTEGERS
        }
        return columns | {"ratio_counts": pa.nulls(n, types.field("ratio_counts").type)}
    absent[updates.rows] = False
    start, lengths_offsets, flat = _trimmed(updates.ratios)
    columns = {}
    for column, name in zip(
        [*updates.facts.T, updates.ratio_first + start], UPDATE_INTEGERS, strict=True
    ):
        values = np.zeros(n, np.int64)
        values[updates.rows] = column
        columns[name] = pa.array(values, types.field(name).type, mask=absent)
    lengths = np.zeros(n, np.int64)
    lengths[updates.rows] = np.diff(lengths_offsets)
    order = np.argsort(updates.rows, kind="stable")
    pieces = [
        updates.ratios.reshape(-1)[flat[lengths_offsets[i] : lengths_offsets[i + 1]]] for i in order
    ]
    values = np.concatenate([*pieces, np.zeros(0, np.int64)])
    columns["ratio_counts"] = _list_array(
        np.concatenate([[0], np.cumsum(lengths)]), values, mask=absent
    )
    return columns


class RowBuffer:
    """Rows gathered one at a time: convenient for a few of them; ``encode`` is for many."""

    def __init__(self) -> None:
        self._histograms: list[ExponentHistogram] = []
        self._labels: list[dict[str, Any]] = []
        self._updates: dict[int, UpdateCounts] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def append(
        self,
        histogram: ExponentHistogram,
        update: UpdateCounts | None = None,
        **labels: Any,
    ) -> None:
        """Add one row.

        Args:
            histogram: A single histogram (batch shape ``()``).
            update: For rows of kind ``update``.
            **labels: As ``encode`` wants them, one value each.
        """
        if update is not None:
            self._updates[len(self)] = update
        self._histograms.append(histogram)
        self._labels.append(labels)

    def to_table(self) -> pa.Table:
        """The rows as an Arrow table with ``schema()``."""
        names = self._labels[0] if self._labels else dict.fromkeys(_LABELS)
        labels = {name: [row[name] for row in self._labels] for name in names}
        return encode(stack(self._histograms), labels, self._stacked_updates())

    def _stacked_updates(self) -> UpdateStack | None:
        if not self._updates:
            return None
        items = list(self._updates.values())
        first = min(u.ratio_first_exponent for u in items)
        last = max(u.ratio_first_exponent + len(u.ratio_counts) for u in items)
        ratios = np.zeros((len(items), last - first), np.int64)
        for row, u in zip(ratios, items, strict=True):
            at = u.ratio_first_exponent - first
            row[at : at + len(u.ratio_counts)] = u.ratio_counts
        facts = [[getattr(u, name) for name in list(UPDATE_INTEGERS)[:-1]] for u in items]
        rows = np.fromiter(self._updates, np.int64)
        return UpdateStack(rows, np.array(facts, np.int64), first, ratios)


_LABELS = (
    "step",
    "micro",
    "rank",
    "tensors",
    "kind",
    "name",
    "dtype",
    "placement",
    "stage",
    "scale",
    "skipped",
)
