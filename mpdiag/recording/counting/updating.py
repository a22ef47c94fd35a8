"""Weight updates: what a step changed, and what FP16 and BF16 weights would have made of it.

Weights and updates are counted as any tensor is. In the same pass over a block each weight and its
update are rounded to FP16 and BF16, and the ratio |w|/|Δw| gets the exponent that it has; ratios are
then counted by comparison, too, four powers of two in place of the four quarters of one.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.comparing import (
    COMPARING_WORK,
    FEW,
    compare,
    count_block,
    count_few,
    is_wide,
    planes_at,
)
from mpdiag.recording.counting.compiled import compiled
from mpdiag.recording.counting.layout import (
    CHANGED,
    INFS,
    QUARTERS,
    RATIO_BINS,
    RATIO_FIRST,
    RATIO_ZEROS,
    SWALLOWED_BF16,
    SWALLOWED_FP16,
    VANISHED_FP16,
)
from mpdiag.recording.counting.numba_kernels import (
    CELL_ROOM,
    ROOM,
    ROWS,
    TABLES_AT,
    USED,
    WORK,
    append,
    append_row,
    clear_edges,
    collect,
    finish,
    note_edges,
    opened,
)
from mpdiag.recording.counting.numba_kernels import count_values as plain_values
from mpdiag.recording.counting.vectors import GROUP, as_bits, as_float, pointer

U = np.uint32
F = np.float32


_BLOCK = 2048  # weights, updates and what is made of them stay in the first-level cache
_OFFSET = 256  # keeps a ratio of normal values positive in 32 bits
_SHIFT = -RATIO_FIRST - _OFFSET
_NONE = np.uint16(0xFFFF)
_MASK, _SUBNORMAL = U(layout.MAGNITUDE), U(layout.LARGEST_SUBNORMAL)
_EXPONENT, _SIGN = U(layout.INFINITY), U(0x80000000)


@compiled(inline="always")
def _fp16(bits):  # type: ignore[no-untyped-def]
    """A float32 rounded to FP16, infinities included.

    Rounded by adding and taking away a number whose spacing is FP16's at that size.
    """
    field = min(max(U(bits & _EXPONENT), U(113 << 23)), U(143 << 23))
    magic = as_float(U(U(field + U(13 << 23)) | U(bits & _SIGN)))
    rounded = F(F(as_float(bits) + magic) - magic)
    return rounded if abs(rounded) < F(65520.0) else F(rounded * F(np.inf))


@compiled(inline="always")
def _bf16(bits):  # type: ignore[no-untyped-def]
    """A float32 rounded to BF16: the upper half of its bits, to nearest even."""
    return as_float(U(U(U(bits + U(0x7FFF)) + U(U(bits >> U(16)) & U(1))) & U(0xFFFF0000)))


@compiled()
def _note_facts(w_bits, d_bits, n, facts):  # type: ignore[no-untyped-def]
    """Count the changed, and those of which FP16 or BF16 weights would not have taken the update."""
    changed, vanished, swallowed, swallowed_b = U(0), U(0), U(0), U(0)
    for i in range(n):
        w, d = w_bits[i], d_bits[i]
        moved = as_float(d) != F(0)
        half, half_d = _fp16(w), _fp16(d)
        total = _fp16(as_bits(F(half + half_d)))
        brain = _bf16(w)
        total_b = _bf16(as_bits(F(brain + _bf16(d))))
        changed = U(changed + U(moved))
        vanished = U(vanished + U(moved & (half_d == F(0))))
        swallowed = U(swallowed + U(moved & (total == half)))
        swallowed_b = U(swallowed_b + U(moved & (total_b == brain)))
    facts[RATIO_BINS + CHANGED] += changed
    facts[RATIO_BINS + VANISHED_FP16] += vanished
    facts[RATIO_BINS + SWALLOWED_FP16] += swallowed
    facts[RATIO_BINS + SWALLOWED_BF16] += swallowed_b


@compiled(inline="always")
def _is_tame(limits):  # type: ignore[no-untyped-def]
    """Whether every value of a block is 0, or from 2^-100 up to below 2^14."""
    return limits[0] >= U(27 << 24) and limits[1] < U(141 << 24)


@compiled()
def _note_tame_facts(w_bits, d_bits, n, facts):  # type: ignore[no-untyped-def]
    """``_note_facts`` of values that are far from overflow and from FP32's subnormals.

    Then one and a half times a power of two rounds values of either sign to FP16 and to BF16.
    Returns how many updates are 0.
    """
    changed, vanished, swallowed, swallowed_b = U(0), U(0), U(0), U(0)
    to_half, to_brain = U((13 << 23) + (1 << 22)), U((16 << 23) + (1 << 22))
    least = U(113 << 23)
    for i in range(n):
        w_field, d_field = U(w_bits[i] & _EXPONENT), U(d_bits[i] & _EXPONENT)
        w, d = as_float(w_bits[i]), as_float(d_bits[i])
        magic = as_float(U(max(w_field, least) + to_half))
        half = F(F(w + magic) - magic)
        magic = as_float(U(max(d_field, least) + to_half))
        total = F(half + F(F(d + magic) - magic))
        magic = as_float(U(max(U(as_bits(total) & _EXPONENT), least) + to_half))
        half_total = F(F(total + magic) - magic)
        magic = as_float(U(w_field + to_brain))
        brain = F(F(w + magic) - magic)
        magic = as_float(U(d_field + to_brain))
        total = F(brain + F(F(d + magic) - magic))
        magic = as_float(U(U(as_bits(total) & _EXPONENT) + to_brain))
        brain_total = F(F(total + magic) - magic)
        changed = U(changed + U(d != F(0)))
        # Up to 2^-25 an update is 0 in FP16; less one, an update of 0 is the largest.
        vanished = U(vanished + U(U(U(d_bits[i] & _MASK) - U(1)) < U(102 << 23)))
        swallowed = U(swallowed + U(half_total == half))
        swallowed_b = U(swallowed_b + U(brain_total == brain))
    unchanged = n - np.int64(changed)  # they stay as they are in every format
    facts[RATIO_BINS + CHANGED] += changed
    facts[RATIO_BINS + VANISHED_FP16] += vanished
    facts[RATIO_BINS + SWALLOWED_FP16] += np.int64(swallowed) - unchanged
    facts[RATIO_BINS + SWALLOWED_BF16] += np.int64(swallowed_b) - unchanged
    return unchanged


@compiled(inline="always")
def _normalised(bits):  # type: ignore[no-untyped-def]
    """Bits of a positive float32 as if the exponent field went on below zero."""
    if bits > 0x7FFFFF:
        return bits
    shift = 0
    while bits < 0x800000:
        bits <<= 1
        shift += 1
    return bits - (shift << 23)  # the leading bit now fills field 1, as in the smallest normal


@compiled()
def _ratios(w_bits, d_bits, n, tops):  # type: ignore[no-untyped-def]
    """Write exponents of |w|/|Δw| as tops; returns how many, of zeros, the largest, the smallest.

    The exponent comes of the difference of the bits, as the quarter of a value does of its bits: no
    division, and exact at powers of two. Infinities and NaNs have no ratio.
    """
    rare, zeros, unchanged = U(0), U(0), U(0)
    low, high = U(1 << 16), U(0)
    for i in range(n):
        w, d = U(w_bits[i] & _MASK), U(d_bits[i] & _MASK)
        none, same = w == U(0), d == U(0)
        rare = U(rare + U(U(w - U(1)) < _SUBNORMAL) + U(U(d - U(1)) < _SUBNORMAL))
        rare = U(rare + U(max(w, d) >= _EXPONENT))
        zeros = U(zeros + U(none & (d != U(0))))
        unchanged = U(unchanged + U(same))
        k = U(U(U(U(U(w - d) - U(1)) + U(_OFFSET << 23)) >> U(23)) + U(_SHIFT))
        apart = none | same
        low = min(low, U(1 << 16) if apart else k)
        high = max(high, U(0) if apart else k)
        tops[i] = _NONE if apart else np.uint16(k << U(6))
    left = n - np.int64(zeros) - np.int64(unchanged)
    if rare != U(0):
        low, high = U(1 << 16), U(0)
        for i in range(n):
            old, moved = np.int64(w_bits[i] & _MASK), np.int64(d_bits[i] & _MASK)
            if old == 0 or moved == 0:
                continue
            if max(old, moved) >= np.int64(_EXPONENT):
                tops[i] = _NONE
                left -= 1
                continue
            k = U(((_normalised(old) - _normalised(moved) - 1) >> 23) - RATIO_FIRST)
            tops[i] = np.uint16(k << U(6))
            low, high = min(low, k), max(high, k)
    return left, zeros, np.int64(high), np.int64(low)


@compiled()
def _tame_ratios(w_bits, d_bits, n, unchanged, tops):  # type: ignore[no-untyped-def]
    """``_ratios`` of what ``_note_tame_facts`` takes, of which so many updates are 0."""
    left, low, high = U(0), U(0xFFFFFFFF), U(0)
    for i in range(n):
        w, d = U(w_bits[i] & _MASK), U(d_bits[i] & _MASK)
        both = min(w, d) != U(0)
        k = U(U(U(U(w - d) + U((_OFFSET << 23) - 1)) >> U(23)) + U(_SHIFT))
        left = U(left + U(both))
        low = min(low, k if both else U(0xFFFFFFFF))
        high = max(high, k if both else U(0))
        tops[i] = np.uint16(k << U(6)) if both else _NONE
    count = np.int64(left)
    return count, n - count - unchanged, np.int64(high), np.int64(low)


@compiled()
def _add_ratios(tops, n, facts):  # type: ignore[no-untyped-def]
    for i in range(n):
        ratio = tops[i] >> np.uint16(6)
        if ratio < np.uint16(RATIO_BINS):
            facts[np.uint64(ratio)] += 1


@compiled()
def _update_block(w_bits, d_bits, n, tame, tops, planes, found, facts, ahead):  # type: ignore[no-untyped-def]
    """Count the facts and ratios of a block of at most ``BLOCK`` updates."""
    if tame:
        unchanged = _note_tame_facts(w_bits, d_bits, n, facts)
        left, zeros, high, low = _tame_ratios(w_bits, d_bits, n, unchanged, tops)
    else:
        _note_facts(w_bits, d_bits, n, facts)
        left, some, high, low = _ratios(w_bits, d_bits, n, tops)
        zeros = np.int64(some)
    facts[RATIO_BINS + RATIO_ZEROS] += zeros
    for i in range(n, (n + GROUP - 1) // GROUP * GROUP):
        tops[i] = _NONE
    if left > 0:
        if is_wide(tops, n, high >> 2, low >> 2):
            _add_ratios(tops, n, facts)
        else:
            compare(tops, n, left, high >> 2, low >> 2, planes, found, facts, ahead)


@compiled()
def count_update(  # type: ignore[no-untyped-def]
    before, after, n, w_row, w_edges, d_row, d_edges, facts, w_work, d_work
):
    """Count weights, updates and what FP16 and BF16 weights would have made of them, in one pass.

    Args:
        before: Where the float32 weights lie that the step started from.
        after: Where those lie that it left.
        n: How many.
        w_row: int64 (``SCRATCH``,), raw row of the weights before, added to.
        w_edges: float64 (2,), their extremes, updated.
        d_row: int64 (``SCRATCH``,), raw row of after - before, added to.
        d_edges: float64 (2,), their extremes, updated.
        facts: int64 (``UPDATE_ROW``,): changed weights by |w|/|Δw| in (2^e, 2^(e+1)], then facts.
        w_work: uint8 (``COMPARING_WORK``,).
        d_work: uint8 (``COMPARING_WORK``,).
    """
    delta = d_work[:TABLES_AT].view(np.float32)
    d_bits = d_work[:TABLES_AT].view(np.uint32)
    w_tables = w_work[TABLES_AT:WORK].view(np.uint32).reshape(4, layout.TABLE)
    d_tables = d_work[TABLES_AT:WORK].view(np.uint32).reshape(4, layout.TABLE)
    tops = w_work[WORK:planes_at].view(np.uint16)
    planes = w_work[planes_at:COMPARING_WORK]
    limits, found = np.empty(2, np.uint32), np.empty(8, np.int64)
    w_extremes, d_extremes = np.empty(2, np.uint32), np.empty(2, np.uint32)
    wide = np.empty(2, np.uint64)
    clear_edges(w_extremes, wide)
    clear_edges(d_extremes, wide)
    w_infs, d_infs = w_row[INFS], d_row[INFS]
    w_tallied, d_tallied = 0, 0
    for start in range(0, n, _BLOCK):
        m = min(_BLOCK, n - start)
        place = before + 4 * start
        old = carray(pointer(place), _BLOCK, np.float32)
        new = carray(pointer(after + 4 * start), _BLOCK, np.float32)
        w_bits = carray(pointer(place), _BLOCK, np.uint32)
        for i in range(m):
            delta[i] = new[i] - old[i]
        next_w, ahead = place + 4 * m, after + 4 * (start + m)
        tame = False
        if m < FEW:
            count_few(w_bits, m, w_row, w_extremes)
            count_few(d_bits, m, d_row, d_extremes)
        else:
            beside = np.int64(d_bits.ctypes.data)
            w_tallied += count_block(
                place, w_bits, m, tops, planes, limits, found, w_tables, w_row, w_extremes, next_w
            )
            tame = _is_tame(limits)
            d_tallied += count_block(
                beside, d_bits, m, tops, planes, limits, found, d_tables, d_row, d_extremes, ahead
            )
            tame = tame and _is_tame(limits)
        _update_block(w_bits, d_bits, m, tame, tops, planes, found, facts, ahead)
        if w_tallied + d_tallied >= 1 << 18:  # blocks: before an entry of 32 bits is full
            collect(w_tables, w_row)
            collect(d_tables, d_row)
            w_tallied, d_tallied = 0, 0
    if w_tallied > 0:
        collect(w_tables, w_row)
    if d_tallied > 0:
        collect(d_tables, d_row)
    finish(w_row, w_infs)
    finish(d_row, d_infs)
    note_edges(layout.FLOAT32, w_extremes, wide, w_edges)
    note_edges(layout.FLOAT32, d_extremes, wide, d_edges)


@compiled()
def count_update_in_tables(  # type: ignore[no-untyped-def]
    before, after, n, w_row, w_edges, d_row, d_edges, facts, w_work, d_work
):
    """``count_update`` without vectors of its own, for where LLVM refuses them."""
    delta = d_work[:TABLES_AT].view(np.float32)
    d_bits = d_work[:TABLES_AT].view(np.uint32)
    tops = w_work[:TABLES_AT].view(np.uint16)
    for start in range(0, n, _BLOCK):
        m = min(_BLOCK, n - start)
        old = carray(pointer(before + 4 * start), _BLOCK, np.float32)
        new = carray(pointer(after + 4 * start), _BLOCK, np.float32)
        for i in range(m):
            delta[i] = new[i] - old[i]
        w_bits = carray(pointer(before + 4 * start), _BLOCK, np.uint32)
        _note_facts(w_bits, d_bits, m, facts)
        _, zeros, _, _ = _ratios(w_bits, d_bits, m, tops)
        facts[RATIO_BINS + RATIO_ZEROS] += zeros
        _add_ratios(tops, m, facts)
        plain_values(np.int64(delta.ctypes.data), m, layout.FLOAT32, d_row, d_edges, w_work)
    plain_values(before, n, layout.FLOAT32, w_row, w_edges, w_work)


@compiled()
def count_updates(pairs, w_scratch, d_scratch, facts, counts, ratios):  # type: ignore[no-untyped-def]
    """Count many updates into packed rows; returns how many there was room for.

    Args:
        pairs: int64 (k, 3): where float32 weights lie before a step, where after it, how many.
        w_scratch: Scratch memory, see ``numba_kernels.ROW_AT``.
        d_scratch: Another one.
        facts: int64 (``UPDATE_ROW``,), scratch.
        counts: Where two rows of each go, weights and updates; see ``numba_kernels.ROWS``.
        ratios: Where its facts go.
    """
    w_row, w_edges, w_work = opened(w_scratch)
    d_row, d_edges, d_work = opened(d_scratch)
    for i in range(len(pairs)):
        if counts[ROWS] + 2 > counts[ROOM] or counts[USED] + 2 * QUARTERS > counts[CELL_ROOM]:
            return i
        if ratios[ROWS] >= ratios[ROOM] or ratios[USED] + RATIO_BINS > ratios[CELL_ROOM]:
            return i
        before, after, n = pairs[i, 0], pairs[i, 1], pairs[i, 2]
        count_update(before, after, n, w_row, w_edges, d_row, d_edges, facts, w_work, d_work)
        append_row(w_scratch, counts, 1, 0)
        append_row(d_scratch, counts, 1, 0)
        append(facts, RATIO_BINS, layout.UPDATE, ratios)
    return len(pairs)


@compiled()
def count_updates_in_tables(pairs, w_scratch, d_scratch, facts, counts, ratios):  # type: ignore[no-untyped-def]
    """``count_updates`` without vectors of its own."""
    w_row, w_edges, w_work = opened(w_scratch)
    d_row, d_edges, d_work = opened(d_scratch)
    for i in range(len(pairs)):
        if counts[ROWS] + 2 > counts[ROOM] or counts[USED] + 2 * QUARTERS > counts[CELL_ROOM]:
            return i
        if ratios[ROWS] >= ratios[ROOM] or ratios[USED] + RATIO_BINS > ratios[CELL_ROOM]:
            return i
        before, after, n = pairs[i, 0], pairs[i, 1], pairs[i, 2]
        count_update_in_tables(
            before, after, n, w_row, w_edges, d_row, d_edges, facts, w_work, d_work
        )
        append_row(w_scratch, counts, 1, 0)
        append_row(d_scratch, counts, 1, 0)
        append(facts, RATIO_BINS, layout.UPDATE, ratios)
    return len(pairs)
