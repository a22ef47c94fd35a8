"""What adding up in a narrow format loses: a bound for any sum, and where a sum of equal values stops.

Each addition rounds by at most half a unit in the last place, so that n of them are off by at most
``n·u / (1 − n·u)`` of the sum of all magnitudes, in whatever order they are added (Higham 2002, lemma
3.1 and section 4.2). A sum of equal values stops growing when a value is at most half a unit in its
last place: that takes ``2^bits`` of a power of two, and up to half as many more of other mantissas.
"""

from mpdiag.numerics.formats import STORED_IN

BITS = {dtype: fmt.mantissa_bits + 1 for dtype, fmt in STORED_IN.items()}
"""Bits of the mantissa, with the leading one."""


def sum_bound(dtype: str, roundings: int) -> float:
    """How far a sum can be off after some roundings, as a share of the sum of all magnitudes.

    Args:
        dtype: ``bfloat16`` or ``float16``.
        roundings: Additions, and roundings of what is added.

    Returns:
        Infinity where nothing is known any more.

    Raises:
        KeyError: If the format is another.
    """
    off = roundings * 2.0 ** -BITS[dtype]
    return off / (1.0 - off) if off < 1.0 else float("inf")


def growing(dtype: str) -> tuple[int, int]:
    """The fewest and the most equal values, by mantissa, that a sum takes before it stops growing.

    Args:
        dtype: ``bfloat16`` or ``float16``.

    Raises:
        KeyError: If the format is another.
    """
    return 1 << BITS[dtype], 3 * (1 << (BITS[dtype] - 1)) - 1
