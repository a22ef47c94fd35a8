"""The operations of a few recorded steps: one row each, with what it read and what it wrote.

Two shapes of the same rows: ``Operation`` objects, which rules walk through as the graph they are
(a tensor names the operation that produced it), and an Arrow table with ``schema()``, which lies in
``operations/*.parquet`` and is readable without this package. docs/run-folder.md describes every column.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mpdiag.files.arrow_columns import array_from
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import BINS, MAX_EXPONENT, MIN_EXPONENT, ExponentHistogram

if TYPE_CHECKING:
    import pyarrow as pa

Phase = Literal["forward", "backward", "update"]
"""``update``: after the last backward pass of the step (clipping, unscaling)."""

NONE = -1
"""No operation: a tensor nobody produced within the step, a forward operation without another."""


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """One tensor that an operation read or wrote.

    Attributes:
        argument: Name of the operation's argument; ``out`` for results.
        tensor: Number within the step; the same memory of the same version has one number.
        producer: Index of the operation that wrote it, ``NONE`` for what came from outside.
        parameter: Name of the parameter or buffer it is, empty otherwise.
        shape: Sizes.
        dtype: Without ``torch.``.
        counted: Whether it has a histogram (floating point, with values).
        first_exponent, counts, means: The histogram as ``stats/*.parquet`` stores it.
        zeros, subnormals, infs, nans, fp16_overflow: Counts.
        absmax, absmin: Largest finite and smallest non-zero |x|; 0 and infinity where there is none.
    """

    argument: str
    tensor: int
    producer: int
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    counted: bool = False
    first_exponent: int = 0
    counts: tuple[int, ...] = ()
    means: bytes = b""
    zeros: int = 0
    subnormals: int = 0
    infs: int = 0
    nans: int = 0
    fp16_overflow: int = 0
    absmax: float = 0.0
    absmin: float = float("inf")

    @property
    def numel(self) -> int:
        """Elements, by its shape."""
        return math.prod(self.shape)

    @cached_property
    def histogram(self) -> ExponentHistogram:
        """Its values by power of two; batch shape ()."""
        dense = np.zeros(BINS, np.int64)
        at = self.first_exponent - MIN_EXPONENT
        dense[at : at + len(self.counts)] = self.counts
        scales = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=np.float64))
        sums = np.zeros(BINS)
        codes = np.frombuffer(self.means, np.uint8)
        sums[at : at + len(codes)] = 1.0 + codes / 255.0
        return ExponentHistogram(
            first=MIN_EXPONENT,
            counts=dense,
            sums=sums * dense * scales,
            zeros=np.asarray(self.zeros),
            subnormals=np.asarray(self.subnormals),
            infs=np.asarray(self.infs),
            nans=np.asarray(self.nans),
            fp16_overflow=np.asarray(self.fp16_overflow),
            absmax=np.asarray(self.absmax),
            absmin=np.asarray(self.absmin),
        )

    def unscaled(self, scale: float) -> TensorRecord:
        """A gradient without its loss scale, which its powers of two take as the nearest one.

        ``fp16_overflow`` stays as recorded unless nothing overflows: at most as many do.
        """
        highest = self.first_exponent + len(self.counts) - 1
        shift = max(round(math.log2(scale)), highest - MAX_EXPONENT)
        below = max(0, MIN_EXPONENT + shift - self.first_exponent)  # FP32 subnormals by then
        return replace(
            self,
            first_exponent=max(self.first_exponent - shift, MIN_EXPONENT),
            counts=self.counts[below:],
            means=self.means[below:],
            subnormals=self.subnormals + sum(self.counts[:below]),
            fp16_overflow=self.fp16_overflow * FP16.overflows(self.absmax / scale),
            absmax=self.absmax / scale,
            absmin=self.absmin / scale,
        )


@dataclass(frozen=True, eq=False)
class Operation:
    """One ATen operation of a recorded step.

    Attributes:
        step, rank, index: Where it stands: ``index`` counts the operations of the step.
        op: ATen's name without overload: ``add``, ``_softmax``.
        overload: ``Tensor``, ``default`` …
        phase: Forward, backward, or after the last backward pass.
        module: The module being called, None outside every module of the recording.
        node: Name of the autograd node whose backward it belongs to, empty in the forward pass.
        forward: In backward: index of the forward operation it is the backward of.
        file, line, code: Where the user's code called it; of a backward operation, its forward one.
        function: Outermost function of ``torch.nn.functional`` in between, if any.
        scalars: Arguments that are no tensors, by name: plain JSON values.
        reduction: How many values are added (or compared) to make one of the result; 1 where none.
        flops, bytes: What it computes, and what it reads and writes.
        facts: What a rule needs and no histogram says, by name; see ``recording/facts.py``.
        inputs, outputs: Its tensors.
    """

    step: int
    rank: int
    index: int
    op: str
    overload: str
    phase: Phase
    module: str | None
    node: str
    forward: int
    file: str
    line: int
    code: str
    function: str
    scalars: Mapping[str, Any] = field(default_factory=dict)
    reduction: int = 1
    flops: int = 0
    bytes: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()

    @property
    def where(self) -> str:
        """``model.py:12``, or empty where no line of the user's is known."""
        return f"{self.file}:{self.line}" if self.file else ""

    def input(self, *arguments: str) -> TensorRecord | None:
        """The first input of one of these names."""
        return next((t for t in self.inputs if t.argument in arguments), None)


_TEXT = ("op", "overload", "phase", "module", "node", "file", "code", "function")
_JSON = ("scalars", "facts")
_TENSOR_COUNTS = ("zeros", "subnormals", "infs", "nans", "fp16_overflow")


def tensor_schema() -> pa.StructType:
    """The Arrow type of a tensor in ``inputs`` and ``outputs``."""
    import pyarrow as pa

    return pa.struct(
        [
            ("argument", pa.string()),
            ("tensor", pa.int32()),
            ("producer", pa.int32()),
            ("parameter", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("dtype", pa.string()),
            ("counted", pa.bool_()),
            ("first_exponent", pa.int16()),
            ("counts", pa.list_(pa.int64())),
            ("means", pa.binary()),
            *[(name, pa.int64()) for name in _TENSOR_COUNTS],
            ("absmax", pa.float64()),
            ("absmin", pa.float64()),
        ]
    )


def schema() -> pa.Schema:
    """The Arrow schema of ``operations/*.parquet``, schema version 1."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    tensors = pa.list_(tensor_schema())
    return pa.schema(
        [
            ("step", pa.int32()),
            ("rank", pa.int16()),
            ("index", pa.int32()),
            *[(name, word) for name in _TEXT],
            ("line", pa.int32()),
            ("forward", pa.int32()),
            *[(name, pa.string()) for name in _JSON],
            ("reduction", pa.int64()),
            ("flops", pa.int64()),
            ("bytes", pa.int64()),
            ("inputs", tensors),
            ("outputs", tensors),
        ]
    )


def encode(operations: Iterable[Operation]) -> pa.Table:
    """Operations as an Arrow table with ``schema()``."""
    import pyarrow as pa

    rows = list(operations)
    expected = schema()
    arrays = []
    for column in expected:
        values = [getattr(row, column.name) for row in rows]
        if column.name in _JSON:
            values = [json.dumps(v) for v in values]
        elif column.name in ("inputs", "outputs"):
            values = [[_tensor_row(t) for t in tensors] for tensors in values]
        arrays.append(array_from(values, column.type))
    return pa.table(arrays, schema=expected)


def decode(table: pa.Table) -> list[Operation]:
    """The inverse of ``encode``.

    Raises:
        KeyError: If a column is missing.
        ValueError: If a column holds what it should not.
    """
    result = []
    tensors: dict[tuple[Any, ...], TensorRecord] = {}
    for row in table.select(schema().names).cast(schema()).to_pylist():
        _refuse_nonsense(row)
        place = (row["rank"], row["step"])
        for name in _JSON:
            row[name] = json.loads(row[name])
            if not isinstance(row[name], dict):
                raise TypeError(f"{name} holds no object")
        for name in ("inputs", "outputs"):
            found = []
            for t in row[name]:
                # A view has its tensor's number, but a shape of its own.
                seen_as = (t["argument"], t["parameter"], *t["shape"])
                key = (*place, t["tensor"], t["producer"], *seen_as)
                known = tensors.get(key)
                if known is None:
                    known = tensors[key] = _tensor_record(t)
                found.append(known)
            row[name] = tuple(found)
        result.append(Operation(**row))
    _refuse_broken_links(result)
    return result


_LARGEST = 1 << 53
_LARGEST_SCALAR = 1 << 64


def _refuse_nonsense(row: Mapping[str, Any]) -> None:
    """Refuse what no recorder writes.

    Raises:
        ValueError: Naming the column.
    """
    wrong = next((k for k, v in row.items() if v is None and k != "module"), None)
    if wrong is None and row["phase"] not in get_args(Phase):
        wrong = "phase"
    for t in () if wrong else (*row["inputs"], *row["outputs"]):
        if t is None or None in [*t["shape"], *(v for k, v in t.items() if k != "absmin")]:
            wrong = "inputs or outputs"
        elif not _is_sound(t):
            wrong = f"{t['argument']!r}"[:40]
    for name in () if wrong else ("step", "rank", "index", "reduction", "flops", "bytes"):
        if row[name] < 0:
            wrong = name
    if wrong is not None:
        raise ValueError(f"an operation's {wrong} holds a value that mpdiag never writes there")


def _refuse_odd_numbers(operation: Operation) -> None:
    """Refuse facts that are no numbers, and numbers that no float holds.

    Raises:
        ValueError: Naming the fact or the argument.
    """
    for name, value in (*operation.facts.items(), *operation.scalars.items()):
        number = type(value) in (int, float)
        too_large = type(value) is int and abs(value) > _LARGEST_SCALAR
        if too_large or (name in operation.facts and not number):
            raise ValueError(
                f"an operation's {name[:40]!r} holds a value that mpdiag never writes there"
            )


def _refuse_broken_links(operations: Iterable[Operation]) -> None:
    """Refuse operations out of their order, or that name one which is not there.

    Raises:
        ValueError: Naming what is wrong.
    """
    steps: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for op in operations:
        _refuse_odd_numbers(op)
        steps[op.rank, op.step].append(op)
    for found in steps.values():
        for i, op in enumerate(found):
            links = (op.forward, *(t.producer for t in (*op.inputs, *op.outputs)))
            if op.index != i or not all(NONE <= link < len(found) for link in links):
                message = f"operation {i} of step {op.step} is missing, or names one that is"
                raise ValueError(message)


def _is_sound(t: Mapping[str, Any]) -> bool:
    bins = t["counts"]
    counts = [*bins, *(t[name] for name in _TENSOR_COUNTS)]
    low = math.inf if t["absmin"] is None else t["absmin"]
    first, last = t["first_exponent"], t["first_exponent"] + len(bins) - 1
    return (
        all(size >= 0 for size in t["shape"])
        and math.prod(t["shape"]) <= _LARGEST
        and all(n is not None and 0 <= n <= _LARGEST for n in counts)
        and len(bins) == len(t["means"])
        and (not bins or (first >= MIN_EXPONENT and last < MIN_EXPONENT + BINS))
        and 0 <= t["absmax"] < math.inf
        and low > 0
    )


def _tensor_row(tensor: TensorRecord) -> dict[str, Any]:
    row = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__}
    if not np.isfinite(tensor.absmin):
        row["absmin"] = None  # JSON-like readers know no infinity; null says: none
    return row


def _tensor_record(row: dict[str, Any]) -> TensorRecord:
    absmin = float("inf") if row["absmin"] is None else row["absmin"]
    return TensorRecord(
        **{**row, "shape": tuple(row["shape"]), "counts": tuple(row["counts"]), "absmin": absmin}
    )
