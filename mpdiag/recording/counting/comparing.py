"""Counting by comparison: the kernel that counts on the CPU.

A table with an entry for each quarter of a power of two takes one increment a value, and no processor
makes more than about one in a cycle. Comparing a block of values with each quarter in turn is faster,
as a tensor spans few of them: ``vectors`` compares 256 values at once. The few values far below the
largest are picked out one by one, and a block that spans more than comparing can gain, by a sample of
it, goes to tables, as does one with infinities or NaNs. All ways count the same. While a block is
counted the next one is fetched into cache.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.compiled import compiled
from mpdiag.recording.counting.layout import (
    FLOAT32,
    FLOAT64,
    FP16_OVERFLOW,
    INFS,
    SUBNORMALS,
    ZEROS,
)
from mpdiag.recording.counting.numba_kernels import (
    BLOCK,
    CELL_ROOM,
    ROOM,
    ROWS,
    TABLES_AT,
    USED,
    WORK,
    append_row,
    clear_edges,
    collect,
    finish,
    limits_of,
    note_edges,
    note_limits,
    opened,
    rare_values,
    widened,
)
from mpdiag.recording.counting.vectors import (
    GROUP,
    OCTAVES,
    PLANES,
    SCANNED,
    below,
    count_beyond,
    count_pair,
    fetch,
    lowest_bit,
    ones_in,
    pointer,
    scan,
    slice_bits,
)

U = np.uint32

FEW = 64
"""Of fewer values than this each is counted by itself."""
planes_at = WORK + 2 * BLOCK
_PLANE_BYTES = BLOCK // GROUP * PLANES * 32
COMPARING_WORK = planes_at + _PLANE_BYTES + 2 * (BLOCK + 4)
"""Bytes of scratch memory: as ``WORK``, then tops, planes, and the tops that are picked out."""
_MASK, _INFINITY = U(layout.MAGNITUDE), U(layout.INFINITY)
_SUBNORMAL, _OVERFLOW = U(layout.LARGEST_SUBNORMAL), U(layout.OVERFLOW)


@compiled()
def _pick_out(tops, n, limit, picked, row):  # type: ignore[no-untyped-def]
    """Count the values whose tops are below a limit, one by one.

    They are few and lie anywhere, so a branch for each would be guessed wrong. They are gathered first:
    of 64 values two are written down, whatever they are, and only as many kept as are below.
    """
    kept = np.uint64(0)
    for word in range((n + 63) // 64):
        mask = below(tops, word, limit)
        at = kept
        kept += ones_in(mask)
        for _ in range(2):
            picked[at] = tops[np.uint64(64 * word) + lowest_bit(mask)]
            mask &= mask - np.uint64(1)
            at += np.uint64(1)
        while mask != np.uint64(0):
            picked[at] = tops[np.uint64(64 * word) + lowest_bit(mask)]
            mask &= mask - np.uint64(1)
            at += np.uint64(1)
    for i in range(kept):
        row[np.uint64(picked[np.uint64(i)] >> np.uint16(6))] += 1


@compiled()
def tally_tops(tops, n, tables, ahead):  # type: ignore[no-untyped-def]
    """``numba_kernels.tally``, of tops, while 2 bytes for each value are fetched into cache."""
    whole = n // SCANNED * SCANNED
    for start in range(0, whole, SCANNED):
        fetch(ahead + 2 * start)
        for i in range(start, start + SCANNED, 4):
            for way in range(4):
                tables[way, np.uint64(tops[np.uint64(i + way)] >> np.uint16(6))] += U(1)
    for i in range(whole, n):
        tables[0, np.uint64(tops[i] >> np.uint16(6))] += U(1)


@compiled()
def is_wide(tops, n, highest, lowest):  # type: ignore[no-untyped-def]
    """Whether so many octaves hold values that tables are faster, as far as one in ``n // 64`` tells."""
    if highest - lowest < 28:
        return False
    limit, step, far = (highest - 15) << 8, max(n // 64, 1), 0
    for i in range(0, n, step):
        far += np.int64(tops[i]) < limit
    return 16 * far * step > n


@compiled()
def compare(tops, n, left, highest, lowest, planes, found, row, ahead):  # type: ignore[no-untyped-def]
    """Count the quarters of a block.

    Args:
        tops: uint16, a multiple of ``GROUP`` long, padded with 0xFFFF.
        n: How many values.
        left: How many of them are not zero.
        highest: The largest exponent field of these.
        lowest: The smallest one.
        planes: uint8, scratch: planes, and the tops that are picked out.
        found: int64 (8,), scratch.
        row: int64, added to.
        ahead: Address of the values that are counted next.
    """
    groups = (n + GROUP - 1) // GROUP
    octave = highest
    half, quarter = ahead + 2 * n, ahead + 3 * n
    # Two octaves cost some 5 ns a group, turning it into planes 15 ns, a value picked out 2 ns.
    while 4 * left > groups * min(5 * max(octave - lowest + 1, 0), 80):
        slice_bits(tops, groups, 4 * octave + 3, planes, half)
        enough = False
        for pair in range(OCTAVES // 2):
            count_pair(planes, groups, pair, found, quarter + 64 * groups * min(pair, 3))
            key, before = 4 * octave + 3, left
            for i in range(min(8, key + 1)):
                row[key - i] += found[i]
                left -= found[i]
            octave -= 2
            # The next two may hold as large a part of what is left as these did.
            rest = 5 * groups * max(octave - lowest + 1, 0)
            enough = 4 * left <= rest and 2 * left * (before - left) <= 5 * groups * before
            if enough:
                break
        if enough:
            break
    if left > 0:
        picked = planes[_PLANE_BYTES:].view(np.uint16)
        _pick_out(tops, n, (octave + 1) << 8, picked, row)


@compiled()
def _note_finite(address, bits, n, low, high, row, extremes):  # type: ignore[no-untyped-def]
    """``note_limits`` for a block without infinities and NaNs."""
    largest = U(high >> U(1))
    smallest = U(U(low + U(1)) >> U(1))  # 0 where every value is zero
    if smallest == U(0):
        return
    extremes[0] = max(extremes[0], largest)
    extremes[1] = min(extremes[1], smallest)
    if largest >= _OVERFLOW or smallest <= _SUBNORMAL:
        whole = n // SCANNED * SCANNED
        both = count_beyond(address, whole, np.int64(_OVERFLOW), np.int64(_SUBNORMAL))
        row[FP16_OVERFLOW] += both & 0xFFFFFFFF
        row[SUBNORMALS] += both >> 32
        for i in range(whole, n):
            x = U(bits[i] & _MASK)
            row[FP16_OVERFLOW] += x >= _OVERFLOW
            row[SUBNORMALS] += (x <= _SUBNORMAL) & (x != U(0))


@compiled()
def count_few(bits, n, row, extremes):  # type: ignore[no-untyped-def]
    """Count values one by one."""
    low, high = limits_of(bits, n)
    for i in range(n):
        key = np.int64(U(U(bits[i] << U(1)) - U(1)) >> U(22))
        if key < layout.QUARTERS:
            row[key] += 1
        row[ZEROS] += key == layout.TABLE - 1
    note_limits(bits, n, low, high, row, extremes)


@compiled()
def count_block(  # type: ignore[no-untyped-def]
    address, bits, n, tops, planes, limits, found, tables, row, extremes, ahead
):
    """Count a block; returns whether tables counted it.

    Args:
        address: Where its values lie.
        bits: uint32 (n or more,), the same values.
        n: How many, at most ``BLOCK``.
        tops: uint16 (``BLOCK``,), scratch.
        planes: uint8, scratch.
        limits: uint32 (2,), written: the smallest ``(bits << 1) - 1``, the largest ``bits << 1``.
        found: int64 (8,), scratch.
        tables: uint32 (4, ``TABLE``), added to where tables count.
        row: int64 (``SCRATCH``,), added to.
        extremes: uint32 (2,), updated.
        ahead: Address of the values that are read next, which are fetched into cache.
    """
    whole = n // SCANNED * SCANNED
    zeros = scan(address, whole, tops, limits, ahead)
    low, high = limits[0], limits[1]
    for i in range(whole, n):
        doubled = U(bits[i] << U(1))
        moved = U(doubled - U(1))
        low, high = min(low, moved), max(high, doubled)
        tops[i] = np.uint16(moved >> U(16))
        zeros += tops[i] == np.uint16(0xFFFF)
    limits[0], limits[1] = low, high
    for i in range(n, (n + GROUP - 1) // GROUP * GROUP):
        tops[i] = np.uint16(0xFFFF)
    if U(high >> U(1)) >= _INFINITY:
        rare_values(bits, n, row, extremes)
        tally_tops(tops, n, tables, ahead + 2 * n)
        return True
    _note_finite(address, bits, n, low, high, row, extremes)
    if zeros < n:
        highest, lowest = np.int64(U(high - U(1)) >> U(24)), np.int64(low >> U(24))
        if is_wide(tops, n, highest, lowest):
            tally_tops(tops, n, tables, ahead + 2 * n)
            return True
        compare(tops, n, n - zeros, highest, lowest, planes, found, row, ahead)
    row[ZEROS] += zeros
    return False


@compiled()
def count_values(address, n, kind, row, edges, work):  # type: ignore[no-untyped-def]
    """``numba_kernels.count_values``, faster; ``work`` is uint8 (``COMPARING_WORK``,)."""
    block = work[:TABLES_AT].view(np.uint32)
    tables = work[TABLES_AT:WORK].view(np.uint32).reshape(4, layout.TABLE)
    tops = work[WORK:planes_at].view(np.uint16)
    planes = work[planes_at:COMPARING_WORK]
    limits, found = np.empty(2, np.uint32), np.empty(8, np.int64)
    extremes, wide = np.empty(2, np.uint32), np.empty(2, np.uint64)
    clear_edges(extremes, wide)
    infs, tallied = row[INFS], 0
    size = 8 if kind == FLOAT64 else 4 if kind == FLOAT32 else 2
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        place = address + 4 * start
        if kind != FLOAT32:
            widened(address, start, m, kind, block, wide)
            place = np.int64(block.ctypes.data)
        bits = carray(pointer(place), BLOCK, np.uint32)
        if m < FEW:
            count_few(bits, m, row, extremes)
        else:
            ahead = address + size * (start + m)
            if count_block(
                place, bits, m, tops, planes, limits, found, tables, row, extremes, ahead
            ):
                tallied += m
            if tallied >= 1 << 30:  # before an entry of 32 bits is full
                collect(tables, row)
                tallied = 0
    if tallied > 0:
        collect(tables, row)
    finish(row, infs)
    note_edges(kind, extremes, wide, edges)


@compiled()
def count_row(address, n, kind, repeat, zeros, scratch, table):  # type: ignore[no-untyped-def]
    """``numba_kernels.count_row``, faster; scratch memory is of ``COMPARING_WORK``."""
    if table[ROWS] >= table[ROOM] or table[USED] + layout.QUARTERS > table[CELL_ROOM]:
        return -1
    row, edges, work = opened(scratch)
    count_values(address, n, kind, row, edges, work)
    return append_row(scratch, table, repeat, zeros)


@compiled()
def count_rows(items, scratch, table):  # type: ignore[no-untyped-def]
    """``numba_kernels.count_rows``, faster."""
    for i in range(len(items)):
        n, kind, repeat, zeros = items[i, 1], items[i, 2], items[i, 3], items[i, 4]
        if count_row(items[i, 0], n, kind, repeat, zeros, scratch, table) < 0:
            return i
    return len(items)
