"""What a block format makes of a matrix: squared error, bias and SQNR, on fixed sample tiles.

Sources: TransformerEngine's ``reference_nvfp4.py`` (the rotation, its signs, and that the tensor's scale
follows from the rotated tensor); arXiv 2509.25149 (rotation and stochastic rounding in NVFP4 training).
"""

import torch
from torch import Tensor

from mpdiag.emulation.block_rounding import quantize_blocks
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import BlockFormat

TILE = 128
"""Rows and columns of a tile: every block of a named format but a row lies whole in one."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of the rotation, as in TransformerEngine's weight gradients."""


def tile_errors(
    tiles: Tensor,
    fmt: BlockFormat,
    *,
    rotated: bool = False,
    bits: Tensor | None = None,
    tensor_amax: Tensor | None = None,
    line_amax: Tensor | None = None,
) -> Tensor:
    """What rounding to a format does to each of some tiles; waits for no device.

    Args:
        tiles: FP32 (tiles, …, length): blocks lie along the last axis.
        fmt: The format.
        rotated: Whether these are values after ``rotate``. A rotation changes no sum of products: only
            Σ(q - x) is that of values rotated back.
        bits: For stochastic rounding: random integers in [0, 2^32) of the tiles' shape.
        tensor_amax: The largest magnitude of the tensor that tiles are of, for formats with a scale a
            tensor; of the rotated tensor, if tiles are. None: of all tiles.
        line_amax: (tiles, …): the largest magnitudes of the lines that tiles are cut from, for formats
            with a scale a row. None: of the tiles' lines.

    Returns:
        float64 (tiles, 5): zeros, Σx², Σ(q - x)², Σ(q - x) and Σ(q - x)·x.
    """
    if fmt.block == "row" and line_amax is not None:
        longer = torch.cat([tiles, line_amax.float()[..., None]], -1)
        found = quantize_blocks(longer, fmt)[..., :-1]
    else:
        found = quantize_blocks(tiles, fmt, -1, bits, tensor_amax)
    zeros = ((found == 0) & (tiles != 0)).flatten(1).sum(1)
    off, exact = (found - tiles).flatten(1).double(), tiles.flatten(1).double()
    shift = off
    if rotated:  # rotating back and adding up multiplies by the rotated ones
        ones = rotate(torch.ones(len(_SIGNS), dtype=torch.float64, device=tiles.device))
        shift = off * ones.repeat(off.shape[1] // len(_SIGNS))
    sums = exact * exact, off * off, shift, off * exact
    return torch.stack([zeros, *(one.sum(1) for one in sums)]).T


def rotate(x: Tensor) -> Tensor:
    """Multiply groups of 16 along the last axis by signs and by the Hadamard matrix / 4.

    By additions alone, so that no matrix product rounds its operands to TF32.

    Args:
        x: FP32; its last axis has a multiple of 16 elements.

    Raises:
        ValueError: If the axis has another size.
    """
    size, length = len(_SIGNS), x.shape[-1]
    if length % size:
        raise ValueError(f"a rotation takes multiples of {size} values, not {length}")
    groups = x.reshape(-1, size) * torch.tensor(_SIGNS, dtype=x.dtype, device=x.device)
    for half in (8, 4, 2, 1):
        left, right = groups.reshape(-1, size // (2 * half), 2, half).unbind(2)
        groups = torch.stack([left + right, left - right], 2)
    return (groups / 4).reshape(x.shape)


def sample_positions(tiles: int, generator: CounterGenerator, count: int) -> list[int]:
    """Draw some of ``tiles`` tiles, the same ones at each step, in random order, none twice.

    Args:
        tiles: How many there are.
        generator: What seed and tensor decide; its step does not.
        count: The most that are returned.
    """
    fixed = CounterGenerator(generator.seed, 0, generator.tensor)
    if tiles > 16 * count:
        return list(dict.fromkeys((fixed.bits((2 * count,)) % tiles).tolist()))[:count]
    return fixed.bits((tiles,)).topk(min(count, tiles)).indices.tolist()
