"""What adding up in a narrow format loses: a bound for any sum, and where a sum of equal values stops.

Each addition rounds by at most half a unit in the last place, so that n of them are off by at most
``n·u / (1 − n·u)`` of the sum of all magnitudes, in whatever order they are added (Higham 2002, lemma
3.1 and section 4.2). A sum of equal positive values stops growing when a value is at most half a unit in
the sum's last place; when that is depends on the mantissa alone, so all are tried.
"""

from functools import lru_cache

import numpy as np

from mpdiag.numerics.decay import rounded

BITS = {"bfloat16": 8, "float16": 11}
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


@lru_cache(maxsize=8)
def growing(dtype: str) -> tuple[int, int]:
    """How many equal values a sum takes before it stops growing.

    Args:
        dtype: ``bfloat16`` or ``float16``.

    Returns:
        The fewest and the most over all mantissas: sums of normal values that do not overflow.

    Raises:
        KeyError: If the format is another.
    """
    places = 1 << (BITS[dtype] - 1)
    value = (1.0 + np.arange(places) / places).astype(np.float32)
    total, taken = value, np.ones(places, np.int64)
    while True:
        after = rounded(total + value, dtype)
        moved = after != total
        if not moved.any():
            return int(taken.min()), int(taken.max())
        total, taken = after, taken + moved
