"""Counting by comparison: the kernel that counts on the CPU.

A table with an entry for each quarter of a power of two takes one increment a value, and no processor
makes more than about one in a cycle. Comparing a block of values with each quarter in turn is faster,
as a tensor spans few of them: ``vectors`` compares 256 values at once. The few values far below the
largest are picked out one by one, and a block that spans more than comparing can gain goes to the
tables of ``numba_kernels``, as does one with infinities or NaNs. All ways count the same.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.compiled import compiled
from mpdiag.recording.counting.layout import FLOAT32, FP16_OVERFLOW, INFS, SUBNORMALS, ZEROS
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
    tally,
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
    lowest_bit,
    pointer,
    scan,
    slice_bits,
)

U = np.uint32

FEW = 64
"""Of fewer values than this each is counted by itself."""
planes_at = WORK + 2 * BLOCK
COMPARING_WORK = planes_at + BLOCK // GROUP * PLANES * 32
"""Bytes of scratch memory: as ``WORK``, then tops and planes."""
_MASK, _INFINITY = U(layout.MAGNITUDE), U(layout.INFINITY)
_SUBNORMAL, _OVERFLOW = U(layout.LARGEST_SUBNORMAL), U(layout.OVERFLOW)


@compiled()
def _pick_out(tops, n, limit, row):  # type: ignore[no-untyped-def]
    """Count the values whose tops are below a limit, one by one."""
    for word in range((n + 63) // 64):
        mask = below(tops, word, limit)
        while mask != np.uint64(0):
            top = tops[64 * word + lowest_bit(mask)]
            row[np.uint64(top >> np.uint16(6))] += 1
            mask &= mask - np.uint64(1)


@compiled()
def tally_tops(tops, n, highest, tables):  # type: ignore[no-untyped-def]
    """Count the quarters of a block up to ``highest`` into tables; ``tops`` is padded to a group."""
    limit, spare = np.uint64(highest), np.uint64(layout.QUARTERS)  # an entry that nobody reads
    for i in range(0, n, 4):
        for way in range(4):
            quarter = np.uint64(tops[i + way] >> np.uint16(6))
            tables[way, quarter if quarter <= limit else spare] += U(1)


@compiled()
def compare(tops, n, left, highest, lowest, planes, found, row, ahead):  # type: ignore[no-untyped-def]
    """Count the quarters of a block; returns -1, or from which one down tables are faster.

    Args:
        tops: uint16, a multiple of ``GROUP`` long, padded with 0xFFFF.
        n: How many values.
        left: How many of them are not zero.
        highest: The largest exponent field of these.
        lowest: The smallest one.
        planes: uint8, scratch.
        found: int64 (8,), scratch.
        row: int64, added to.
        ahead: Address of the values that are counted next.
    """
    groups = (n + GROUP - 1) // GROUP
    octave = highest
    # An octave costs some 5 ns a group, a value picked out 2 ns, one in a table 0.6 ns.
    while 2 * left > 5 * groups * max(octave - lowest + 1, 0):
        slice_bits(tops, groups, 4 * octave + 3, planes, ahead)
        for pair in range(OCTAVES // 2):
            count_pair(planes, groups, pair, found)
            key = 4 * octave + 3
            for i in range(min(8, key + 1)):
                row[key - i] += found[i]
                left -= found[i]
            octave -= 2
            rest = 5 * groups * max(octave - lowest + 1, 0)
            if octave == highest - 4 and 5 * min(rest, 2 * left) > 3 * n:
                return 4 * octave + 3
            if 2 * left <= rest:
                break
    if left > 0:
        _pick_out(tops, n, (octave + 1) << 8, row)
    return -1


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
def tally_block(bits, n, tables, row, extremes):  # type: ignore[no-untyped-def]
    """Count a block into tables."""
    low, high = limits_of(bits, n)
    tally(bits, n, tables)
    note_limits(bits, n, low, high, row, extremes)


@compiled()
def count_block(address, bits, n, tops, planes, limits, found, tables, row, extremes):  # type: ignore[no-untyped-def]
    """Count a block; returns how many blocks tables had better count, this one included.

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
    """
    whole = n // SCANNED * SCANNED
    zeros = scan(address, whole, tops, limits)
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
        tally(bits, n, tables)
        return 1
    _note_finite(address, bits, n, low, high, row, extremes)
    if zeros < n:
        highest, lowest = np.int64(U(high - U(1)) >> U(24)), np.int64(low >> U(24))
        ahead = address + 4 * n
        quarter = compare(tops, n, n - zeros, highest, lowest, planes, found, row, ahead)
        if quarter >= 0:
            tally_tops(tops, n, quarter, tables)
            row[ZEROS] += zeros
            return 16
    row[ZEROS] += zeros
    return 0


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
    infs, tallied, wide_blocks = row[INFS], 0, 0
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
            if wide_blocks > 1:
                tally_block(bits, m, tables, row, extremes)
                wide_blocks -= 1
            else:
                wide_blocks = count_block(
                    place, bits, m, tops, planes, limits, found, tables, row, extremes
                )
            tallied += m * (wide_blocks > 0)
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
