"""Operands of matrix products as matrices of lines, and what is counted of them.

A product's operand is rarely a matrix in memory: a batch of them, its transpose, a convolution's input
as ``unfold`` would lay it out. ``Matrix`` says by axes what is a line, and cuts tiles out of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpdiag.emulation.block_errors import TILE, rotate, sample_positions, tile_errors
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import Rounding, block_format
from mpdiag.numerics.block_statistics import BlockError
from mpdiag.recording.counting.block_depths import count_depths, depths_of
from mpdiag.runs.block_operands import FormatError, Gemm, OperandRole

COUNTED_TILES, MEASURED_TILES = 16, 4
"""Tiles of which depths are counted; those of them that are quantised in blocks of 128 × 128."""
MEASURED_LINES, GROUPS, SQUARE = 128, 8, 16
"""Pieces of lines that are quantised, into how many random groups they fall, and how many lie together
of a weight, which has square blocks. Errors follow from the groups' spread (Wolter, *Introduction to
Variance Estimation*, chapter 2)."""
_GROUP = 16
"""Neighbours that a rotation takes together."""
_FORMATS = (
    *("fp8_tensor", "fp8_row", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3"),
    *("mxfp4", "nvfp4"),
)
_FP4 = "mxfp4", "nvfp4"
_format = lru_cache(block_format)


@dataclass(frozen=True, eq=False)
class Sample:
    """Pieces of lines of a matrix.

    Attributes:
        values: FP32 (n, lines, 128), zeros beyond the matrix.
        maxima: (n, lines), the largest magnitudes of the whole lines, unless there is a ``source``.
        counts: (n,): values of each.
        weights: FP64 (n,): a sum over all of the matrix is about that of the weighted pieces, times
            its values for one of theirs.
    """

    values: Tensor
    maxima: Tensor | None
    counts: Tensor
    weights: Tensor


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

    def _offset(self, axes: Sequence[int], index: Tensor) -> Tensor:
        """How far in memory indices into some axes lie, the last one fastest."""
        found = torch.zeros_like(index)
        for axis in reversed(axes):
            size = self.values.shape[axis]
            found += index % size * self.values.stride(axis)
            index = index // size
        return found

    def _cut(self, matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Pieces (n, lines, values) of some matrices (n,): lines (n, lines), places (n, values)."""
        x = self.values
        span = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
        memory = x.as_strided((span,), (1,), x.storage_offset())
        starts = self._offset(self.batch, matrices)[:, None] + self._offset(self.lines, rows)
        index = starts[:, :, None] + self._offset(self.along, columns)[:, None]
        return memory[index.to(x.device)]

    def tiles(self, positions: Sequence[int]) -> Iterator[Tensor]:
        """Tiles of 128 × 128, or smaller at the edges; blocks lie along the last axis.

        Args:
            positions: Which of ``tile_count``.

        Yields:
            Some of one shape: (n, lines, values).
        """
        _, lines, length = self.shape
        shapes: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for position in positions:
            place, j = divmod(position, -(-length // TILE))
            matrix, i = divmod(place, -(-lines // TILE))
            top, left = i * TILE, j * TILE
            shapes[min(TILE, lines - top), min(TILE, length - left)].append((matrix, top, left))
        for (tall, wide), places in shapes.items():
            matrices, tops, lefts = torch.tensor(places, device="cpu").unbind(1)
            down, right = (torch.arange(size, device="cpu") for size in (tall, wide))
            rows, columns = tops[:, None] + down, lefts[:, None] + right
            yield self._cut(matrices, rows, columns)

    def sample(self, tall: int, tensor: str) -> Sample:
        """Draw pieces of lines from all of it; waits for no device.

        A piece's chance grows with its largest magnitude squared, and its weight is the inverse: a
        few lines with most of Σx² are not missed. Half of the chance is the same for all but zeros.
        (Hansen, Hurwitz, *On the Theory of Sampling from Finite Populations*, 1943.)

        Args:
            tall: Lines of a piece.
            tensor: Decides the random numbers.
        """
        batch, lines, length = self.shape
        across, down = -(-length // TILE), -(-lines // tall)
        pieces, device = batch * across * down, self.values.device
        count = min(pieces, MEASURED_LINES // tall)
        chosen = torch.arange(count, device=device)
        weights = torch.ones(count, dtype=torch.float64, device=device)
        maxima = self.maxima
        if count < pieces:  # integers add up to the same on each device, in any order
            whole = torch.ones(pieces, device=device)
            if maxima is not None:
                whole = F.pad(maxima, (0, 0, 0, -lines % tall)).unflatten(1, (down, tall)).amax(2)
            shares = (whole / whole.amax()).nan_to_num(1.0).flatten()
            sizes = (shares.square() * 2.0**24).long()
            sizes = torch.where(shares > 0, sizes + sizes.sum() // pieces + 1, 0)
            ends = sizes.cumsum(0)
            bits = CounterGenerator(0, tensor=tensor).bits((count,), device) >> 12
            inside = (ends[-1] // count * bits) >> 20
            chosen = torch.searchsorted(ends, ends[-1] * chosen // count + inside, right=True)
            chosen.clamp_(max=pieces - 1)  # of a matrix of zeros
            weights = ends[-1].double() / (sizes[chosen].clamp(min=1) * count)
        place, j = chosen // across, chosen % across
        matrices = place // down
        rows = (place % down * tall)[:, None] + torch.arange(tall, device=device)
        columns = (j * TILE)[:, None] + torch.arange(TILE, device=device)
        inside = (rows < lines)[:, :, None] & (columns < length)[:, None]
        rows, columns = rows.clamp(max=lines - 1), columns.clamp(max=length - 1)
        found = self._cut(matrices, rows, columns).float()
        longest = None if maxima is None else maxima.amax(2)[matrices[:, None], rows]
        counts = inside.sum((1, 2))
        weights = weights * counts.sum() / (batch * lines * length)
        return Sample(torch.where(inside, found, 0.0), longest, counts, weights)

    @cached_property
    def maxima(self) -> Tensor | None:
        """Largest magnitudes of 128 values along a line, (matrices, lines, n); None with a source."""
        if self.source is not None:
            return None
        _, lines, length = self.shape
        matrix = self.values.permute(*self.batch, *self.lines, *self.along)
        matrix = matrix.flatten(-len(self.along))
        # A reduction across the order of memory takes 50 times as long.
        is_line = matrix.stride(-1) <= matrix.stride(-2)
        x, axis = (matrix, -1) if is_line else (matrix.mT, -2)
        whole = length - length % TILE
        parts = [x.narrow(axis, 0, whole).unflatten(axis, (-1, TILE))] if whole else []
        if whole < length:
            parts.append(x.narrow(axis, whole, length - whole).unsqueeze(axis - 1))
        found = torch.cat([torch.maximum(p.amax(axis), -p.amin(axis)) for p in parts], axis).float()
        return (found if is_line else found.mT).reshape(-1, lines, -(-length // TILE))


Variant = tuple[str, str, Rounding, bool]
"""A format, another shape of its blocks or "", its rounding, whether values are rotated before."""


def variants(role: OperandRole, gemm: Gemm, length: int, *, plain: bool) -> Iterator[Variant]:
    """What samples are quantised to: what a recipe for this operand may take.

    Args:
        role: Of the operand. Weights have square blocks, too. The gradient of an output alone is also
            rounded stochastically, as in arXiv 2509.25149.
        gemm: Of the product.
        length: Of a line; a rotation takes multiples of 16.
        plain: Whether the largest magnitudes of lines are at hand, see ``Sample``.
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
        errors: For each variant (n, 6): of each piece its values, and what ``tile_errors`` returns,
            weighted.
    """

    sampled: bool
    absmax: Tensor
    depths: Tensor
    errors: dict[Variant, Tensor]

    def fields(self) -> dict[str, Any]:
        """Fields of ``BlockOperand``; waits for the device."""
        histogram, first, maxima = depths_of(self.depths.cpu().numpy())
        absmax = float(self.absmax)
        errors = []
        for variant, pieces in self.errors.items():
            pieces = pieces.cpu()
            groups = torch.arange(len(pieces), device="cpu") % GROUPS
            sums = pieces.new_zeros(min(len(pieces), GROUPS), 6, dtype=torch.float64)
            sums.index_add_(0, groups, pieces)
            tiles = [BlockError(int(n), round(z), *rest) for n, z, *rest in sums.tolist()]
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
    """Count an operand's depths and quantise samples of it; waits for no device.

    Args:
        matrix: The operand; holds values.
        role: Which operand it is.
        gemm: Of which product.
        tensor: Decides which samples, and with the step the bits of stochastic rounding.
        step: The present step.
    """
    random = CounterGenerator(0, step, tensor)
    positions = sample_positions(matrix.tile_count, random, COUNTED_TILES)
    starts = range(0, len(positions), MEASURED_TILES)  # few at a time stay in a cache
    some = (positions[first : first + MEASURED_TILES] for first in starts)
    depths = [count_depths(tiles) for few in some for tiles in matrix.tiles(few)]
    largest = next(x for x in (matrix.maxima, matrix.source) if x is not None)
    low, high = largest.aminmax()
    absmax = torch.maximum(high, -low).float()
    sample = matrix.sample(SQUARE if role == "weight" else 1, tensor)
    counts, weights = sample.counts[:, None], sample.weights[:, None]
    bits = random.bits(sample.values.shape, absmax.device) if role == "grad_output" else None
    turned = rotate(sample.values) if matrix.shape[2] % _GROUP == 0 else sample.values
    errors = {}
    for kind in variants(role, gemm, matrix.shape[2], plain=matrix.source is None):
        name, block, rounding, rotated = kind
        fmt = _format(name, block=block or None, rounding=rounding)
        if name == "fp8_128x128":
            found = [
                F.pad(tile_errors(tiles.float(), fmt), (1, 0), value=tiles[0].numel())
                for tiles in matrix.tiles(positions[:MEASURED_TILES])
            ]
            errors[kind] = torch.cat(found)
            continue
        x = turned if rotated else sample.values
        sums = tile_errors(
            x,
            fmt,
            rotated=rotated,
            bits=bits if rounding == "stochastic" else None,
            tensor_amax=x.abs().amax() if rotated else absmax,
            line_amax=sample.maxima,
        )
        errors[kind] = torch.cat([counts, sums * weights], 1)
    return Measured(matrix.tile_count > COUNTED_TILES, absmax, torch.stack(depths).sum(0), errors)
