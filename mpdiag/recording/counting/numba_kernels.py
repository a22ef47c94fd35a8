"""Numba kernels that count on the CPU: one pass over memory.

Each block of a tensor is read once from memory and then, in cache, once more: a vectorised pass
finds the extremes, a scalar pass counts. Neighbouring values share an exponent, so four tables take
turns; with one table each increment would wait for the one before it.

Numba's own threading stays off: its OpenMP layer kills forked children that count (DataLoader
workers), and its workqueue layer aborts when two threads count. Kernels release the GIL, and
``host`` runs them on threads of its own.

Values are float32 bit patterns, counted as ``layout`` says. With the sign shifted out, a zero wraps
to the last entry, and infinities and NaNs fall into known ones, from which the rare path takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.layout import (
    CHANGED,
    FP16_OVERFLOW,
    INFS,
    NANS,
    QUARTERS,
    RATIO_BINS,
    RATIO_FIRST,
    RATIO_ZEROS,
    RAW,
    SUBNORMALS,
    SWALLOWED_BF16,
    SWALLOWED_FP16,
    VANISHED_FP16,
    ZEROS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

U = np.uint32

_BLOCK = 2048  # 8 KiB: stays in the first-level cache between the two passes
_TABLE = layout.TABLE
_MASK = U(layout.MAGNITUDE)
_INFINITY = U(layout.INFINITY)
_SUBNORMAL = U(layout.LARGEST_SUBNORMAL)
_OVERFLOW = U(layout.OVERFLOW)
_CHUNK = 1 << 30  # values per 32-bit table


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compiled by Numba at the first call, and kept on the disk for the next process."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # an install and a home that may not be written, as in containers
            return njit(nogil=True, **options)(function)

    return compiled


@_compiled(inline="always")
def _tally(bits, n, tables, counts, extremes):  # type: ignore[no-untyped-def]
    """Count one block of bit patterns into ``tables``; rare values into ``counts``."""
    low, high = U(0xFFFFFFFF), U(0)
    for i in range(n):
        doubled = U(bits[i] << U(1))
        low = min(low, U(doubled - U(1)))
        high = max(high, doubled)
    four = n // 4 * 4
    for i in range(0, four, 4):
        a = U(U(bits[i] << U(1)) - U(1))
        b = U(U(bits[i + 1] << U(1)) - U(1))
        c = U(U(bits[i + 2] << U(1)) - U(1))
        d = U(U(bits[i + 3] << U(1)) - U(1))
        tables[0, np.uint64(a >> U(22))] += U(1)
        tables[1, np.uint64(b >> U(22))] += U(1)
        tables[2, np.uint64(c >> U(22))] += U(1)
        tables[3, np.uint64(d >> U(22))] += U(1)
    for i in range(four, n):
        a = U(U(bits[i] << U(1)) - U(1))
        tables[0, np.uint64(a >> U(22))] += U(1)

    largest = U(high >> U(1))
    smallest = U(U(low + U(1)) >> U(1))  # 0 where every value is zero
    if largest < _OVERFLOW and (smallest > _SUBNORMAL or smallest == U(0)):
        extremes[0] = max(extremes[0], largest)
        if smallest != U(0):
            extremes[1] = min(extremes[1], smallest)
        return
    for i in range(n):
        x = U(bits[i] & _MASK)
        if x > _INFINITY:
            counts[NANS] += 1
            counts[SUBNORMALS + RAW] += x > U(0x7FE00000)  # those that share the zeros' entry
        elif x == _INFINITY:
            counts[INFS] += 1
        elif x != U(0):
            extremes[0] = max(extremes[0], x)
            extremes[1] = min(extremes[1], x)
            if x >= _OVERFLOW:
                counts[FP16_OVERFLOW] += 1
            elif x <= _SUBNORMAL:
                counts[SUBNORMALS] += 1


@_compiled(inline="always")
def _collect(tables, counts):  # type: ignore[no-untyped-def]
    """Add four tables to a raw row and clear them."""
    for i in range(QUARTERS):
        counts[i] += (
            np.int64(tables[0, i]) + np.int64(tables[1, i]) + np.int64(tables[2, i]) + tables[3, i]
        )
    last = _TABLE - 1
    counts[ZEROS] += (
        np.int64(tables[0, last]) + np.int64(tables[1, last]) + np.int64(tables[2, last])
    ) + tables[3, last]
    tables[:] = U(0)


@_compiled(inline="always")
def _finish(scratch, counts):  # type: ignore[no-untyped-def]
    """Move infinities out of the top quarter and odd NaNs out of the zeros."""
    for i in range(RAW):
        counts[i] += scratch[i]
    counts[QUARTERS - 1] -= scratch[INFS]
    counts[ZEROS] -= scratch[SUBNORMALS + RAW]


@_compiled()
def occupied(row, length):  # type: ignore[no-untyped-def]
    """Where the first ``length`` entries of a row are not zero: the first one, and one past the last."""
    first, stop = 0, length
    while first < length and row[first] == 0:
        first += 1
    while stop > first and row[stop - 1] == 0:
        stop -= 1
    return first, stop


@_compiled()
def count_float32(bits, counts, extremes):  # type: ignore[no-untyped-def]
    """Add the values to a raw row.

    Args:
        bits: uint32 (n,), the values' bit patterns.
        counts: int64 (``RAW``,), added to.
        extremes: uint32 (2,), bit patterns of the largest and smallest non-zero finite |x| so far.
    """
    tables = np.zeros((4, _TABLE), np.uint32)
    scratch = np.zeros(2 * RAW, np.int64)
    for chunk in range(0, bits.size, _CHUNK):
        for start in range(chunk, min(chunk + _CHUNK, bits.size), _BLOCK):
            n = min(_BLOCK, bits.size - start)
            _tally(bits[start : start + n], n, tables, scratch, extremes)
        _collect(tables, scratch)
    _finish(scratch, counts)


@_compiled()
def count_bfloat16(bits, counts, extremes):  # type: ignore[no-untyped-def]
    """The same for uint16 bit patterns of bfloat16, each the upper half of a float32."""
    tables = np.zeros((4, _TABLE), np.uint32)
    scratch = np.zeros(2 * RAW, np.int64)
    block = np.empty(_BLOCK, np.uint32)
    for chunk in range(0, bits.size, _CHUNK):
        for start in range(chunk, min(chunk + _CHUNK, bits.size), _BLOCK):
            n = min(_BLOCK, bits.size - start)
            for i in range(n):
                block[i] = U(U(bits[start + i]) << U(16))
            _tally(block, n, tables, scratch, extremes)
        _collect(tables, scratch)
    _finish(scratch, counts)


@_compiled()
def count_float64(bits, counts, extremes):  # type: ignore[no-untyped-def]
    """The same for uint64 bit patterns of float64; ``extremes`` are uint64 patterns, too.

    A value is cut to 24 bits with every lost bit gathered in the last ("sticky"), so that it stays
    on its side of each power of two. Beyond float32's range it counts as a subnormal below, in the
    top bin above.
    """
    tables = np.zeros((4, _TABLE), np.uint32)
    scratch = np.zeros(2 * RAW, np.int64)
    unused = np.zeros(2, np.uint32)
    block = np.empty(_BLOCK, np.uint32)
    for chunk in range(0, bits.size, _CHUNK):
        for start in range(chunk, min(chunk + _CHUNK, bits.size), _BLOCK):
            n = min(_BLOCK, bits.size - start)
            for i in range(n):
                x = bits[start + i] & np.uint64(0x7FFFFFFFFFFFFFFF)
                exponent = np.int64(x >> np.uint64(52)) - 1023
                mantissa = x & np.uint64(0x000FFFFFFFFFFFFF)
                if exponent == 1024:
                    block[i] = U(0x7FC00000) if mantissa else _INFINITY
                    continue
                if x != 0:
                    extremes[0] = max(extremes[0], x)
                    extremes[1] = min(extremes[1], x)
                if x == 0:
                    block[i] = U(0)
                elif exponent < -126:
                    block[i] = U(1)
                elif exponent > 127:
                    block[i] = U(0x7F7FFFFF)
                else:
                    sticky = U((mantissa & np.uint64(0x1FFFFFFF)) != 0)
                    head = U(mantissa >> np.uint64(29))
                    block[i] = U(U(exponent + 127) << U(23)) | head | sticky
            _tally(block, n, tables, scratch, unused)
        _collect(tables, scratch)
    _finish(scratch, counts)


# -- weight updates --------------------------------------------------------------------------------

_RATIO_OFFSET = 256  # keeps a ratio of normal values positive in 32 bits
_RATIO_OF_ZERO, _UNCHANGED = 700, 701  # entries that no ratio has, for w = 0 and for Δw = 0


@_compiled()
def count_update(before, after, weights, weight_extremes, updates, update_extremes, facts, ratios):  # type: ignore[no-untyped-def]
    """Count weights, updates and what FP16 and BF16 weights would have made of them, in one pass.

    Args:
        before: float32 (n,), the weights the step started from.
        after: float32 (n,), the weights it left.
        weights: int64 (``RAW``,), raw row of ``before``.
        weight_extremes: uint32 (2,).
        updates: int64 (``RAW``,), raw row of after - before.
        update_extremes: uint32 (2,).
        facts: int64 (``UPDATE``,).
        ratios: int64 (``RATIO_BINS``,), changed weights by |w|/|Δw| in (2^e, 2^(e+1)].
    """
    w_tables = np.zeros((4, _TABLE), np.uint32)
    d_tables = np.zeros((4, _TABLE), np.uint32)
    w_scratch = np.zeros(2 * RAW, np.int64)
    d_scratch = np.zeros(2 * RAW, np.int64)
    r_tables = np.zeros((4, _TABLE), np.int64)
    index = np.empty(_BLOCK, np.uint32)
    delta = np.empty(_BLOCK, np.float32)
    d_bits = delta.view(np.uint32)
    all_w_bits = before.view(np.uint32)
    magic = np.empty(_BLOCK, np.float32)
    m_bits = magic.view(np.uint32)
    half = np.empty(_BLOCK, np.float32)  # fp16(w), then the sum
    half_d = np.empty(_BLOCK, np.float32)
    total = np.empty(_BLOCK, np.float32)
    t_bits = total.view(np.uint32)
    brain_w = np.empty(_BLOCK, np.uint32)
    brain_wf = brain_w.view(np.float32)
    brain_d = np.empty(_BLOCK, np.uint32)
    brain_df = brain_d.view(np.float32)
    changed, swallowed16, swallowed_b, vanished = 0, 0, 0, 0
    for start in range(0, before.size, _BLOCK):
        n = min(_BLOCK, before.size - start)
        old = before[start : start + n]
        new = after[start : start + n]
        w_bits = all_w_bits[start : start + n]
        for i in range(n):
            delta[i] = new[i] - old[i]
        _tally(w_bits, n, w_tables, w_scratch, weight_extremes)
        _tally(d_bits, n, d_tables, d_scratch, update_extremes)

        # FP16: round by adding and taking away a power of two whose spacing is FP16's there.
        for i in range(n):
            e = min(max(U(U(w_bits[i] & _MASK) >> U(23)), U(113)), U(143))
            m_bits[i] = U(U(e + U(13)) << U(23)) | U(w_bits[i] & U(0x80000000))
        for i in range(n):
            half[i] = np.float32(old[i] + magic[i]) - magic[i]
        for i in range(n):
            e = min(max(U(U(d_bits[i] & _MASK) >> U(23)), U(113)), U(143))
            m_bits[i] = U(U(e + U(13)) << U(23)) | U(d_bits[i] & U(0x80000000))
        for i in range(n):
            half_d[i] = np.float32(delta[i] + magic[i]) - magic[i]
        for i in range(n):
            half[i] = (
                half[i] if abs(half[i]) < np.float32(65520.0) else half[i] * np.float32(np.inf)
            )
            half_d[i] = (
                half_d[i]
                if abs(half_d[i]) < np.float32(65520.0)
                else half_d[i] * np.float32(np.inf)
            )
            total[i] = half[i] + half_d[i]
        for i in range(n):
            e = min(max(U(U(t_bits[i] & _MASK) >> U(23)), U(113)), U(143))
            m_bits[i] = U(U(e + U(13)) << U(23)) | U(t_bits[i] & U(0x80000000))
        for i in range(n):
            rounded = np.float32(total[i] + magic[i]) - magic[i]
            rounded = (
                rounded if abs(rounded) < np.float32(65520.0) else rounded * np.float32(np.inf)
            )
            moved = delta[i] != np.float32(0)
            changed += moved
            vanished += moved & (half_d[i] == np.float32(0))
            swallowed16 += moved & (rounded == half[i])
        # BF16: the upper half of the bits, rounded to nearest even.
        for i in range(n):
            w, d = w_bits[i], d_bits[i]
            brain_w[i] = U(U(w + U(0x7FFF)) + U(U(w >> U(16)) & U(1))) & U(0xFFFF0000)
            brain_d[i] = U(U(d + U(0x7FFF)) + U(U(d >> U(16)) & U(1))) & U(0xFFFF0000)
        for i in range(n):
            total[i] = brain_wf[i] + brain_df[i]
        for i in range(n):
            t = t_bits[i]
            t_bits[i] = U(U(t + U(0x7FFF)) + U(U(t >> U(16)) & U(1))) & U(0xFFFF0000)
        for i in range(n):
            swallowed_b += (delta[i] != np.float32(0)) & (total[i] == brain_wf[i])
        # |w|/|Δw| by the same trick as the histogram's: no division, exact at powers of two.
        tiny = False
        for i in range(n):
            w, d = U(w_bits[i] & _MASK), U(d_bits[i] & _MASK)
            tiny |= ((w != U(0)) & (w <= _SUBNORMAL)) | ((d != U(0)) & (d <= _SUBNORMAL))
            k = U(U(U(w - d) - U(1)) + U(_RATIO_OFFSET << 23)) >> U(23)
            k = U(_RATIO_OF_ZERO) if w == U(0) else k
            index[i] = U(_UNCHANGED) if d == U(0) else k
        if tiny:
            for i in range(n):
                w, d = np.int64(w_bits[i] & _MASK), np.int64(d_bits[i] & _MASK)
                if w != 0 and d != 0:
                    exponent = (_normalised(w) - _normalised(d) - 1) >> 23
                    index[i] = U((exponent + _RATIO_OFFSET) & (_TABLE - 1))
        for i in range(n):
            r_tables[i & 3, np.uint64(index[i])] += U(1)
        _collect(w_tables, w_scratch)
        _collect(d_tables, d_scratch)
    _finish(w_scratch, weights)
    _finish(d_scratch, updates)
    shift = _RATIO_OFFSET + RATIO_FIRST
    for way in range(4):
        for i in range(RATIO_BINS):
            ratios[i] += r_tables[way, (i + shift) & (_TABLE - 1)]
        facts[RATIO_ZEROS] += r_tables[way, _RATIO_OF_ZERO]
    facts[CHANGED] += changed
    facts[SWALLOWED_FP16] += swallowed16
    facts[SWALLOWED_BF16] += swallowed_b
    facts[VANISHED_FP16] += vanished


@_compiled(inline="always")
def _normalised(bits):  # type: ignore[no-untyped-def]
    """Bits of a positive float32 as if the exponent field went on below zero."""
    if bits > 0x7FFFFF:
        return bits
    shift = 0
    while bits < 0x800000:
        bits <<= 1
        shift += 1
    return bits - (shift << 23)  # the leading bit now fills field 1, as in the smallest normal


def empty_extremes(wide: bool = False) -> NDArray[np.uint32] | NDArray[np.uint64]:
    """Extremes before anything was counted: largest 0, smallest all ones."""
    if wide:
        return np.array([0, 0xFFFFFFFFFFFFFFFF], np.uint64)
    return np.array([0, 0xFFFFFFFF], np.uint32)
