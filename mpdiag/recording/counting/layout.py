"""The layout of raw rows: what a counter writes on any device, and what reads it.

A value is counted by its float32 bit pattern. ``(bits - 1) >> 21`` is the quarter of a power of two
that it lies in, closed at the top (see ``numerics.histograms``); a zero wraps to the last entry of
the table, and infinities and NaNs fall into known ones, from which each counter moves them to counts
of their own.
"""

QUARTERS = 1020
"""Entries of a raw row that count finite values: quarter i of bin ``i // 4 - 127``."""
ZEROS, SUBNORMALS, INFS, NANS, FP16_OVERFLOW = 1020, 1021, 1022, 1023, 1024
RAW = 1025
"""Length of a raw row of counts, int64."""
TABLE = 1024
"""Entries of the table in which a counter gathers quarters, zeros included."""

MAGNITUDE = 0x7FFFFFFF
"""Mask that clears the sign of a float32."""
INFINITY = 0x7F800000
LARGEST_SUBNORMAL = 0x007FFFFF
OVERFLOW = 0x477FF000
"""65520.0, from which FP16 rounds to infinity."""

RATIO_FIRST = -280
RATIO_BINS = 560
"""|w|/|Δw| of FP32 values lies between 2^-277 and 2^277."""
CHANGED, SWALLOWED_FP16, SWALLOWED_BF16, VANISHED_FP16, RATIO_ZEROS = 0, 1, 2, 3, 4
UPDATE = 5
"""Length of the facts of a weight update, int64."""

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = 0, 1, 2, 3
"""Types of values that are read in place."""
