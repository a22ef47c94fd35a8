"""What a block format makes of a matrix: squared error, bias and SQNR, on fixed sample tiles.

Sources: TransformerEngine's ``reference_nvfp4.py`` (the rotation, its signs, and that the tensor's scale
follows from the rotated tensor); arXiv 2509.25149 (rotation and stochastic rounding in NVFP4 training).
"""

import torch
from torch import Tensor

from mpdiag.emulation.block_rounding import quantize_blocks
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import BlockFormat
from mpdiag.numerics.block_statistics import BlockError

TILE = 128
"""Rows and columns of a tile: every block of a named format but a row lies whole in one."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of the rotation, as in TransformerEngine's weight gradients."""


def measure_error(
    x: Tensor,
    fmt: BlockFormat,
    axis: int = -1,
    *,
    rotated: bool = False,
    generator: CounterGenerator | None = None,
    tensor_amax: Tensor | None = None,
) -> BlockError:
    """What rounding to a format does to values.

    Args:
        x: Floating point.
        fmt: The format.
        axis: Along which blocks lie.
        rotated: Whether 16 neighbours along the axis are rotated before rounding, and back after it.
        generator: For stochastic rounding; tiles that differ in its tensor have bits of their own.
        tensor_amax: The largest magnitude of the tensor that x is a tile of, for formats with a scale
            a tensor; of the rotated tensor, if tiles are. None: of x.

    Raises:
        ValueError: If the format rounds stochastically and there is no generator.
    """
    if (fmt.rounding == "stochastic") != (generator is not None):
        raise ValueError("a generator is for stochastic rounding, which needs one")
    values = x.detach().float()
    bits = None if generator is None else generator.bits(x.shape, x.device)
    read = rotate(values, axis) if rotated else values
    found = quantize_blocks(read, fmt, axis, bits, tensor_amax)
    zeros = int(((found == 0) & (read != 0)).sum())
    if rotated:
        found = rotate(found, axis, back=True)
    exact, off = values.double(), found.double() - values.double()
    sums = torch.stack([exact.square().sum(), off.square().sum(), off.sum(), (off * exact).sum()])
    return BlockError(x.numel(), zeros, *sums.tolist())


def rotate(x: Tensor, axis: int = -1, *, back: bool = False) -> Tensor:
    """Multiply groups of 16 along an axis by signs and by the Hadamard matrix / 4, or undo that.

    By additions alone, so that no matrix product rounds its operands to TF32.

    Args:
        x: FP32; its axis has a multiple of 16 elements.
        axis: Of the groups.
        back: Whether to undo it.

    Raises:
        ValueError: If the axis has another size.
    """
    size, length = len(_SIGNS), x.shape[axis]
    if length % size:
        raise ValueError(f"a rotation takes multiples of {size} values, not {length}")
    moved = x.movedim(axis, -1)
    groups = moved.reshape(-1, size)
    signs = torch.tensor(_SIGNS, dtype=x.dtype, device=x.device)
    if not back:
        groups = groups * signs
    for half in (8, 4, 2, 1):
        left, right = groups.reshape(-1, size // (2 * half), 2, half).unbind(2)
        groups = torch.stack([left + right, left - right], 2)
    groups = groups.reshape(-1, size) / 4
    if back:
        groups = groups * signs
    return groups.reshape(moved.shape).movedim(-1, axis)


def sample_tiles(x: Tensor, generator: CounterGenerator, count: int = 16) -> list[Tensor]:
    """Tiles of a matrix, the same ones at each step; all of them if there are no more than asked for.

    Args:
        x: The last axis is columns, all others are rows.
        generator: What seed and tensor decide; its step does not.
        count: The most tiles that are returned.

    Returns:
        Views of 128 × 128, or smaller at the edges; in order.
    """
    matrix = x.reshape(-1, x.shape[-1])
    rows, columns = (-(-size // TILE) for size in matrix.shape)
    everywhere = rows * columns
    fixed = CounterGenerator(generator.seed, 0, generator.tensor)
    chosen = sorted(fixed.bits((everywhere,)).topk(min(count, everywhere)).indices.tolist())
    return [
        matrix[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        for row, column in (divmod(tile, columns) for tile in chosen)
    ]
