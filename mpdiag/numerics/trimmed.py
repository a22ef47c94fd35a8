"""A root mean square without the few largest values."""

import math

import numpy as np
from numpy.typing import NDArray

DROPPED = 16
"""One value in this many is left out."""
MANY = 64
"""Values below which one twin may come near by chance."""


def is_few(values: NDArray[np.float64]) -> bool:
    """Whether few values carry a tensor: there are no more, or the others are equal, small, or zero.

    (Σ|x|)² / Σx² of them count: 2 k / π of k that are normally distributed, of which half would do.
    """
    if values.size < MANY or not np.isfinite(values).all():
        return values.size < MANY
    sizes = np.unique(np.abs(values))
    return float(sizes.sum()) ** 2 <= float(sizes @ sizes) * MANY / math.pi


def trimmed_rms(values: NDArray[np.float64], dropped: int = DROPPED) -> float:
    """Root mean square of some values without the largest; infinite where one is not finite.

    Where rounding turns a choice (the largest of a window, an expert), single values change by more
    than rounding.

    Args:
        values: The values, (k,).
        dropped: One value in this many is left out.
    """
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():
        return math.inf
    kept = np.sort(np.abs(values))[: values.size - values.size // dropped]
    return float(np.sqrt(np.mean(np.square(kept))))
