"""What a block format does to one matrix, by the sums that a recording has of each tile."""

from mpdiag.emulation.block_errors import rotate, tile_errors
from mpdiag.numerics.block_statistics import BlockError


def measure_error(x, fmt, axis=-1, *, rotated=False, generator=None, tensor_amax=None):
    """The ``BlockError`` of a whole matrix, blocks along an axis; a generator rounds stochastically."""
    assert (fmt.rounding == "stochastic") == (generator is not None)
    bits = None if generator is None else generator.bits(x.shape, x.device).movedim(axis, -1)[None]
    tiles = x.detach().float().movedim(axis, -1)[None]
    tiles = rotate(tiles) if rotated else tiles
    sums = tile_errors(tiles, fmt, rotated=rotated, bits=bits, tensor_amax=tensor_amax)
    zeros, *rest = sums[0].tolist()
    return BlockError(x.numel(), int(zeros), *rest)
