"""The pass of ``unscaling``, compiled by Numba."""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from mpdiag.recording.counting.compiled import compiled
from mpdiag.recording.counting.vectors import as_bits, as_float, pointer

_BLOCK = 4096
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@compiled(fastmath={"reassoc", "contract"}, error_model="numpy")
def unscale_runs(addresses, sizes, squares, largest, first, stop, factor):  # type: ignore[no-untyped-def]
    """Multiply runs of float32 values in place.

    Args:
        addresses: int64 (runs,), where each lies.
        sizes: int64 (runs,), how many values.
        squares: float64 (runs,), written: the sum of the squares of what was read. Those of a block
            are added in float32, as all are in torch's norm: what it finds infinite is so here.
        largest: float32 (runs,), written: the largest magnitude of what was read. Of bit patterns the
            largest is that of a NaN, if there is one.
        first: The first run to take.
        stop: One past the last.
        factor: float32.
    """
    for run in range(first, stop):
        n = sizes[run]
        total, top = np.float64(0.0), np.uint32(0)
        for start in range(0, n, _BLOCK):
            m = min(_BLOCK, n - start)
            values = carray(pointer(addresses[run] + 4 * start), _BLOCK, np.float32)
            part = np.float32(0.0)
            for i in range(m):
                value = values[i]
                values[i] = np.float32(value * factor)
                part += value * value
                top = max(top, np.uint32(as_bits(value) & _MAGNITUDE))
            total += np.float64(part)
        squares[run] = total
        largest[run] = as_float(top)
