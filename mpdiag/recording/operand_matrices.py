"""Operands of matrix products as matrices of lines, and what is counted of them.

A product's operand is rarely a matrix in memory: a batch of them, its transpose, a convolution's input
as ``unfold`` would lay it out. ``Matrix`` says by axes what is a line, and cuts tiles out of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mpdiag.emulation.block_errors import (
    TILE,
    block_errors,
    rotate,
    sample_positions,
    tile_errors,
)
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import Rounding, block_format
from mpdiag.recording.counting.block_depths import count_depths, depths_of
from mpdiag.runs.block_operands import FormatError, Gemm, OperandRole

COUNTED_TILES, MEASURED_TILES, MEASURED_LINES = 16, 4, 32
"""Tiles of which depths are counted; those of them that are quantised, and how many of their lines."""
_GROUP = 16
"""Neighbours that a rotation takes together."""
_FORMATS = (
    *("fp8_tensor", "fp8_row", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3"),
    *("mxfp4", "nvfp4"),
)
_FP4 = "mxfp4", "nvfp4"
_format = lru_cache(block_format)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Matrices of one shape, each line of which is what a product sums over.

    Attributes:
        values: The tensor; its axes are those below, in any order.
        batch: Axes that number the matrices.
        lines: Axes that number the lines of each.
        along: Axes that run along a line.
        source: The tensor with these values, where one may stand in several places.
    """

    values: Tensor
    batch: tuple[int, ...]
    lines: tuple[int, ...]
    along: tuple[int, ...]
    source: Tensor | None = None

    def _size(self, axes: Sequence[int]) -> int:
        return math.prod(self.values.shape[axis] for axis in axes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many matrices, lines of each, values of each line."""
        return self._size(self.batch), self._size(self.lines), self._size(self.along)

    @property
    def tile_count(self) -> int:
        """How many tiles of 128 × 128, or smaller at the edges, it has."""
        batch, lines, length = self.shape
        return batch * -(-lines // TILE) * -(-length // TILE)

    def _offsets(self, axes: Sequence[int]) -> Tensor:
        """Where in memory each index into some axes lies, the last one fastest."""
        found = torch.zeros(1, dtype=torch.int64)
        for axis in axes:
            steps = torch.arange(self.values.shape[axis]) * self.values.stride(axis)
            found = (found[:, None] + steps).flatten()
        return found

    def tiles(self, tensor: str) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
        """Sample tiles of 128 × 128, or smaller at the edges; blocks lie along the last axis.

        Args:
            tensor: What decides which tiles.

        Yields:
            Some tiles of one shape, (n, lines, values); (n, lines), the largest magnitudes of their
            whole lines, unless there is a ``source``; whether they are among those to be quantised.
        """
        _, lines, length = self.shape
        across = -(-length // TILE)
        x = self.values
        span = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
        memory = x.as_strided((span,), (1,), x.storage_offset())
        at = [self._offsets(axes) for axes in (self.batch, self.lines, self.along)]
        highest = self._line_maxima()
        positions = _positions(self.tile_count, tensor)
        for first in range(0, len(positions), MEASURED_TILES):  # few at a time stay in a cache
            shapes: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
            for position in positions[first : first + MEASURED_TILES]:
                place, j = divmod(position, across)
                matrix, i = divmod(place, -(-lines // TILE))
                top, left = i * TILE, j * TILE
                shape = min(TILE, lines - top), min(TILE, length - left)
                shapes[shape].append((matrix, top, left))
            for (tall, wide), places in shapes.items():
                matrices, tops, lefts = (
                    torch.tensor(n)[:, None] for n in zip(*places, strict=True)
                )
                rows, columns = tops + torch.arange(tall), lefts + torch.arange(wide)
                starts = at[0][matrices] + at[1][rows]
                index = starts[:, :, None] + at[2][columns][:, None]
                number = (matrices * lines + rows).to(x.device)
                maxima = None if highest is None else highest[number]
                yield memory[index.to(x.device)], maxima, first == 0

    def _line_maxima(self) -> Tensor | None:
        """Of each line of each matrix."""
        if self.source is not None:
            return None
        matrix = self.values.permute(*self.batch, *self.lines, *self.along)
        inner = tuple(range(-len(self.along), 0))
        return torch.maximum(matrix.amax(inner), -matrix.amin(inner)).flatten()


@lru_cache(maxsize=4096)
def _positions(tiles: int, tensor: str) -> list[int]:
    return sample_positions(tiles, CounterGenerator(0, tensor=tensor), COUNTED_TILES)


Variant = tuple[str, str, Rounding, bool]
"""A format, another shape of its blocks or "", its rounding, whether values are rotated before."""


def variants(role: OperandRole, gemm: Gemm, length: int, *, plain: bool) -> Iterator[Variant]:
    """What sample tiles are quantised to: what a recipe for this operand may take.

    Args:
        role: Of the operand. Weights have square blocks, too. The gradient of an output alone is also
            rounded stochastically, as in arXiv 2509.25149.
        gemm: Of the product.
        length: Of a line; a rotation takes multiples of 16.
        plain: Whether the largest magnitudes of lines are at hand, see ``Matrix.tiles``.
    """
    for name in _FORMATS:
        if plain or name != "fp8_row":
            yield name, "", "nearest", False
    if role == "grad_output":
        yield "fp8_e5m2", "", "nearest", False
    yield "fp8_128x128" if role == "weight" else "fp8_1x128", "", "nearest", False
    if role == "weight":
        yield "nvfp4", "16x16", "nearest", False
    turns = length % _GROUP == 0
    for name in _FP4:
        if turns:
            yield name, "", "nearest", True
        if role == "grad_output":
            yield name, "", "stochastic", False
    if role == "grad_output" and gemm == "wgrad" and turns:
        yield "nvfp4", "", "stochastic", True


@dataclass(frozen=True, eq=False)
class Measured:
    """What was counted of an operand; on its device until it is read.

    Attributes:
        sampled: Whether some tiles were left out.
        absmax: Largest magnitude, without axes.
        depths: What ``count_depths`` returns.
        errors: For each variant: values of a tile, and what ``tile_errors`` returns.
    """

    sampled: bool
    absmax: Tensor
    depths: Tensor
    errors: dict[Variant, list[tuple[int, Tensor]]]

    def fields(self) -> dict[str, Any]:
        """Fields of ``BlockOperand``; waits for the device."""
        histogram, first, maxima = depths_of(self.depths.cpu().numpy())
        absmax = float(self.absmax)
        errors = []
        for variant, groups in self.errors.items():
            tiles = [tile for values, sums in groups for tile in block_errors(sums, values)]
            errors.append(FormatError(*variant, tiles=tuple(tiles)))
        return {
            "sampled": self.sampled,
            "absmax": absmax if math.isfinite(absmax) else 0.0,
            "depths": histogram,
            "maxima_first": first,
            "maxima": maxima,
            "errors": tuple(errors),
        }


def measure(matrix: Matrix, role: OperandRole, gemm: Gemm, tensor: str, step: int) -> Measured:
    """Count an operand's depths and quantise its sample tiles; waits for no device.

    Args:
        matrix: The operand; holds values.
        role: Which operand it is.
        gemm: Of which product.
        tensor: Decides which tiles, and with the step the bits of stochastic rounding.
        step: The present step.
    """
    measured: list[tuple[Tensor, Tensor | None]] = []
    depths = None
    for tiles, maxima, is_measured in matrix.tiles(tensor):
        counts = count_depths(tiles)
        depths = counts if depths is None else depths + counts
        if is_measured:
            measured.append((tiles.float(), maxima))
    assert depths is not None  # it holds values
    low, high = (matrix.values if matrix.source is None else matrix.source).aminmax()
    absmax = torch.maximum(high, -low).float()
    length = matrix.shape[2]
    kinds = list(variants(role, gemm, length, plain=matrix.source is None))
    turns = any(rotated for *_, rotated in kinds)
    few = [tiles[:, :MEASURED_LINES] for tiles, _ in measured]
    turned = [rotate(tiles) if turns else tiles for tiles in few]
    largest = torch.stack([tiles.abs().amax() for tiles in turned]).amax()  # of what is rotated
    errors: dict[Variant, list[tuple[int, Tensor]]] = {kind: [] for kind in kinds}
    for (whole, maxima), cut, rotated_cut in zip(measured, few, turned, strict=True):
        bits = None
        if role == "grad_output":
            bits = CounterGenerator(0, step, tensor).bits(cut.shape, cut.device)
        for kind in kinds:
            name, block, rounding, rotated = kind
            tiles = rotated_cut if rotated else cut
            if name == "fp8_128x128":
                tiles = whole
            sums = tile_errors(
                tiles,
                _format(name, block=block or None, rounding=rounding),
                rotated=rotated,
                bits=bits if rounding == "stochastic" else None,
                tensor_amax=largest if rotated else absmax,
                line_amax=None if maxima is None else maxima[:, :MEASURED_LINES],
            )
            errors[kind].append((tiles[0].numel(), sums))
    return Measured(matrix.tile_count > COUNTED_TILES, absmax, depths, errors)
