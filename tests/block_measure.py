"""What block formats do to a matrix and a block, by the sums of a recording and exact fractions."""

from fractions import Fraction

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


def floor_log2(x):
    """⌊log2 x⌋ of a positive fraction."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def mx_exponent(largest, element, rule):
    """The exponent of an E8M0 scale, from its definition."""
    if not largest:
        return -127
    m, top = Fraction(largest), element.max_exponent
    if rule == "rceil":
        ratio = m / Fraction(element.max)
        exponent = floor_log2(ratio)
        exponent += Fraction(2) ** exponent != ratio
    elif rule == "even":
        half = Fraction(2) ** (floor_log2(m) - element.mantissa_bits - 1)
        exponent = floor_log2(m + half) - top
    else:
        exponent = floor_log2(m) - top
        exponent += rule == "ceil" and Fraction(2) ** floor_log2(m) != m
    return max(-127, min(127, exponent))
