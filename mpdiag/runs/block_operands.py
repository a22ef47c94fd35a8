"""The operands of matrix products, as block formats read them: what ``mpdiag record --blocks`` records.

A product has three matrix products in training, each with two operands. With an input X of tokens ×
features, a weight W of outputs × features and the gradient dY of its output of tokens × outputs::

    fprop    Y  = X · Wᵀ       input, weight             blocks lie along features
    dgrad    dX = dY · W       grad_output, weight       along outputs
    wgrad    dW = dYᵀ · X      grad_output, input        along tokens

An operand is written as a matrix of lines: blocks lie along a line, which is what the product sums over.

- ``linear``: a product with a parameter; ``weight`` is the parameter.
- ``matmul``: of two tensors that are no parameters (``input``, ``weight`` in this order), as ``bmm``.
- ``attention``: call 0 is the product of queries and keys, call 1 that of probabilities and values.
  Fused kernels show no probabilities and no gradient of scores.
- ``convolution``: as the product that it is after ``torch.nn.functional.unfold``: a token is a place
  of the output, a feature is (channel, row, column) of the kernel in this order. dgrad is the product
  before ``fold``: it sums over output channels. Of a transposed convolution, input and output change
  places.
- ``grouped``: of an expert's tokens with its part of a parameter of three axes, in a grouped product;
  ``experts``: the same in a batched one, or one by one. Earlier runs call both ``grouped``.

Rows lie in ``blocks/*.parquet``: one for each step × product × operand. docs/run-folder.md describes
every column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mpdiag.files.arrow_columns import array_from
from mpdiag.numerics.block_formats import BLOCK_FORMATS, Rounding
from mpdiag.numerics.block_statistics import BUCKETS, CLASS_COUNT, BlockError, DepthHistogram

if TYPE_CHECKING:
    import pyarrow as pa

ProductKind = Literal["linear", "convolution", "matmul", "attention", "grouped", "experts"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
OperandRole = Literal["input", "weight", "grad_output"]


@dataclass(frozen=True)
class FormatError:
    """What a block format makes of samples of an operand.

    Attributes:
        format: A name of ``numerics.block_formats.BLOCK_FORMATS``.
        block: Another shape of blocks than the format's own, such as ``16x16``; "" for its own.
        rounding: Of values.
        rotated: Whether 16 neighbours along a line were rotated before (Hadamard), and back after.
        tiles: Of each group of samples in each step; sums but ``values`` are weighted, so that those
            of the whole operand are larger by its values for one of theirs.
    """

    format: str
    block: str
    rounding: Rounding
    rotated: bool
    tiles: tuple[BlockError, ...]

    @property
    def variant(self) -> tuple[str, str, Rounding, bool]:
        """What was measured: format, block, rounding, rotated."""
        return self.format, self.block, self.rounding, self.rotated

    @property
    def total(self) -> BlockError:
        """Sums over all samples."""
        return reduce(add, self.tiles, BlockError(0, 0, 0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True, eq=False)
class BlockOperand:
    """One operand of one matrix product.

    Of a module that is called several times in a step, one call is recorded.

    Attributes:
        rank: The process.
        steps: The steps it was recorded in; one, as it is stored.
        module: Name of the innermost module being called; None outside the models.
        product: The kind of product, see above.
        call: Which product of this kind in a call of the module, from 0.
        gemm: Which of the three matrix products.
        operand: Which of its operands.
        parameter: Name of the parameter that the product is with; "" if it is not known.
        expert: Which expert of a grouped product; None of other products.
        dtype: Of the values, without ``torch.``.
        lines, length: The matrix: how many lines, and the contraction length of each.
        flops: Of the whole product, 2 · lines of both operands · length, in a step.
        sampled: Whether depths are of sample tiles alone; else of all values.
        absmax: Largest magnitude of the whole operand; 0 of one that holds infinities or NaNs.
        depths: Values by depth below their block's largest magnitude, blocks of 32 along a line.
        maxima_first: Exponent of the first entry of ``maxima``.
        maxima: How many blocks of 32 have their largest magnitude in [2^e, 2^(e+1)), from
            ``maxima_first`` on; blocks of zeros and those with infinities or NaNs are not among them.
        errors: By format, on samples: pieces of lines, by chance the more often the larger they are.
    """

    rank: int
    steps: tuple[int, ...]
    module: str | None
    product: ProductKind
    call: int
    gemm: Gemm
    operand: OperandRole
    parameter: str
    expert: int | None
    dtype: str
    lines: int
    length: int
    flops: int
    sampled: bool
    absmax: float
    depths: DepthHistogram
    maxima_first: int
    maxima: tuple[int, ...]
    errors: tuple[FormatError, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells operands apart, in every step and of every rank."""
        place = self.module, self.product, self.call, self.expert
        return *place, self.gemm, self.operand

    @property
    def elements(self) -> int:
        """Values of the whole operand."""
        return self.lines * self.length

    @property
    def counted(self) -> int:
        """Values whose depths were counted."""
        return self.depths.values

    def __add__(self, other: BlockOperand) -> BlockOperand:
        """The same operand in other steps, or of other ranks."""
        first = min(self.maxima_first, other.maxima_first)
        maxima = np.zeros(
            max(self.maxima_first + len(self.maxima), other.maxima_first + len(other.maxima))
            - first,
            np.int64,
        )
        for one in (self, other):
            at = one.maxima_first - first
            maxima[at : at + len(one.maxima)] += np.array(one.maxima, np.int64)
        errors = {error.variant: error for error in self.errors}
        for error in other.errors:
            known = errors.get(error.variant)
            both = error if known is None else replace(known, tiles=known.tiles + error.tiles)
            errors[error.variant] = both
        return replace(
            self,
            steps=tuple(sorted({*self.steps, *other.steps})),
            lines=self.lines + other.lines,
            flops=self.flops + other.flops,
            sampled=self.sampled or other.sampled,
            absmax=max(self.absmax, other.absmax),
            depths=self.depths + other.depths,
            maxima_first=first,
            maxima=tuple(maxima.tolist()),
            errors=tuple(errors.values()),
        )


def merged(operands: Iterable[BlockOperand]) -> list[BlockOperand]:
    """One for each key, all steps and ranks added, in the order of their first appearance.

    ``lines``, and with it ``elements``, and ``flops`` are sums then, too. wgrad's operands have another
    ``length`` where the number of tokens changes: the first one's stays.
    """
    found: dict[tuple[Any, ...], BlockOperand] = {}
    for one in operands:
        found[one.key] = found[one.key] + one if one.key in found else one
    return list(found.values())


_WORDS = ("module", "product", "gemm", "operand", "parameter", "dtype")
_SUMS = ("signal", "error", "shift", "along")
_DEPTHS = ("zeros", "nonfinite", "tiny")


def schema() -> pa.Schema:
    """The Arrow schema of ``blocks/*.parquet``, schema version 1."""
    import pyarrow as pa

    error = pa.struct(
        [
            ("format", pa.string()),
            ("block", pa.string()),
            ("rounding", pa.string()),
            ("rotated", pa.bool_()),
            *[(name, pa.list_(pa.int64())) for name in ("values", "zeros")],
            *[(name, pa.list_(pa.float64())) for name in _SUMS],
        ]
    )
    return pa.schema(
        [
            ("step", pa.int32()),
            ("rank", pa.int16()),
            *[(name, pa.dictionary(pa.int32(), pa.string())) for name in _WORDS],
            ("call", pa.int32()),
            ("expert", pa.int32()),
            ("lines", pa.int64()),
            ("length", pa.int64()),
            ("flops", pa.int64()),
            ("sampled", pa.bool_()),
            ("absmax", pa.float64()),
            *[(name, pa.int64()) for name in _DEPTHS],
            ("depths", pa.list_(pa.int64())),
            ("maxima_first", pa.int16()),
            ("maxima", pa.list_(pa.int64())),
            ("errors", pa.list_(error)),
        ]
    )


def encode(operands: Iterable[BlockOperand]) -> pa.Table:
    """Operands of one step each as an Arrow table with ``schema()``."""
    import pyarrow as pa

    rows = [_row(one) for one in operands]
    expected = schema()
    return pa.table(
        [array_from([row[c.name] for row in rows], c.type) for c in expected], schema=expected
    )


def decode(table: pa.Table) -> list[BlockOperand]:
    """The inverse of ``encode``.

    Raises:
        KeyError: If a column is missing.
        ValueError: If a column holds what mpdiag never writes there.
    """
    return [_operand(row) for row in table.select(schema().names).cast(schema()).to_pylist()]


def _row(one: BlockOperand) -> dict[str, Any]:
    last = int(np.flatnonzero(one.depths.counts.any(0)).max(initial=-1)) + 1
    return {
        **vars(one),
        "step": one.steps[0],
        **{name: getattr(one.depths, name) for name in _DEPTHS},
        "depths": one.depths.counts[:, :last].ravel().tolist(),
        "errors": [
            {
                **vars(error),
                **{
                    name: [getattr(tile, name) for tile in error.tiles]
                    for name in ("values", "zeros", *_SUMS)
                },
            }
            for error in one.errors
        ],
    }


def _operand(row: dict[str, Any]) -> BlockOperand:
    counts = np.array(row["depths"] or [], np.int64)
    numbers = [row[name] for name in (*_DEPTHS, "step", "rank", "lines", "length", "flops")]
    missing = [name for name, v in row.items() if v is None and name not in ("module", "expert")]
    for name, known in (("product", ProductKind), ("gemm", Gemm), ("operand", OperandRole)):
        missing += [] if row[name] in get_args(known) else [name]
    missing += [e["format"] for e in row["errors"] or () if e["format"] not in BLOCK_FORMATS]
    odd = len(counts) % CLASS_COUNT or len(counts) > CLASS_COUNT * BUCKETS or (counts < 0).any()
    if missing or odd or min(numbers) < 0 or not 0 <= row["absmax"] < np.inf:
        raise ValueError("a matrix product's operand holds a value that mpdiag never writes there")
    del row["depths"]
    dense = np.zeros((CLASS_COUNT, BUCKETS), np.int64)
    dense[:, : len(counts) // CLASS_COUNT] = counts.reshape(CLASS_COUNT, -1)
    depths = DepthHistogram(dense, *(row.pop(name) for name in _DEPTHS))
    step, maxima, errors = row.pop("step"), tuple(row.pop("maxima")), []
    for error in row.pop("errors"):
        tiles = zip(*(error.pop(name) for name in ("values", "zeros", *_SUMS)), strict=True)
        errors.append(FormatError(**error, tiles=tuple(BlockError(*tile) for tile in tiles)))
    return BlockOperand(**row, steps=(step,), depths=depths, maxima=maxima, errors=tuple(errors))
