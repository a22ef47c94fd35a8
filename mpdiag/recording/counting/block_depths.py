"""Counting values by their depth below their block's largest magnitude, by torch operations.

``numerics.block_statistics`` says what is counted and why those are the classes and buckets.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpdiag.numerics.block_statistics import (
    BLOCK,
    BUCKETS,
    CLASS_COUNT,
    SMALLEST_MAXIMUM,
    DepthHistogram,
)

_WIDTH = BUCKETS + 1
"""Counts of a class: by bucket, and zeros."""
_NONFINITE, _TINY = CLASS_COUNT, CLASS_COUNT + 1
"""Two more classes, of blocks with an infinity or a NaN, and of those with a tiny largest magnitude."""
_MAXIMA = (_TINY + 1) * _WIDTH
"""From here on: blocks by the biased exponent of their largest magnitude, FP32's 0 to 254."""
SIZE = _MAXIMA + 256
_INFINITY = 0x7F800000
_SMALLEST = int(np.float32(SMALLEST_MAXIMUM).view(np.int32))
_EDGES = (0x000001, 0x400001, 0x600000, 0x600001, 0x700000, 0x700001, 0x780000)
"""Mantissas with which classes of blocks begin."""


def count_depths(values: Tensor) -> Tensor:
    """Count values by depth, and blocks by their largest magnitude; waits for no device.

    Args:
        values: (…, length), floating point: blocks of 32 lie along the last axis, the last of a line
            may be shorter. FP64 is rounded to FP32 first.

    Returns:
        int64 (``SIZE``,).
    """
    missing = -values.shape[-1] % BLOCK
    bits = F.pad(values.float(), (0, missing)).view(torch.int32) & 0x7FFFFFFF
    blocks = bits.reshape(-1, BLOCK)
    largest = blocks.amax(1, keepdim=True)
    exponent = largest & _INFINITY
    edges = torch.tensor(_EDGES, dtype=torch.int32, device=bits.device)
    kind = torch.bucketize(largest & 0x7FFFFF, edges, right=True, out_int32=True)
    kind = torch.where(largest < _SMALLEST, _TINY, kind)
    kind = torch.where(largest >= _INFINITY, _NONFINITE, kind)
    eighths = (blocks - (exponent + 1)) >> 20  # of the block's octave; negative below it
    bucket = (7 - torch.maximum(eighths, eighths >> 1)).clamp(max=BUCKETS - 1)
    bucket = torch.where(blocks == 0, BUCKETS, bucket) + kind * _WIDTH
    counts = torch.zeros(SIZE, dtype=torch.int64, device=bits.device)
    one = torch.ones((), dtype=torch.int64, device=bits.device)
    octave = torch.where(largest == 0, 255, exponent >> 23)  # zeros have none
    for found in (bucket.flatten(), octave.flatten() + _MAXIMA):
        counts.index_add_(0, found, one.expand(len(found)))
    if missing:  # zeros that are not there
        last = kind.reshape(values[..., 0].numel(), -1)[:, -1]
        counts.index_add_(0, last * _WIDTH + BUCKETS, (-missing * one).expand(len(last)))
    return counts


def depths_of(counts: NDArray[np.int64]) -> tuple[DepthHistogram, int, tuple[int, ...]]:
    """What ``count_depths`` returned, read to the host: sums of several are as good.

    Returns:
        The depths; the exponent of the first entry that follows; blocks by the exponent of their
        largest magnitude. FP32's subnormal numbers count as 2^-127; blocks of zeros do not count.
    """
    table = counts[:_MAXIMA].reshape(-1, _WIDTH)
    histogram = DepthHistogram(
        counts=table[:CLASS_COUNT, :BUCKETS],
        zeros=int(table[:, BUCKETS].sum() - table[_NONFINITE, BUCKETS]),
        nonfinite=int(table[_NONFINITE].sum()),
        tiny=int(table[_TINY, :BUCKETS].sum()),
    )
    maxima = counts[_MAXIMA:-1]
    occupied = np.flatnonzero(maxima)
    first, stop = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 127)
    return histogram, first - 127, tuple(maxima[first:stop].tolist())
