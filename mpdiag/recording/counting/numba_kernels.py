"""Plain Numba kernels: tables that count values on the CPU, and the packing of rows.

Each block of a tensor is read once from memory and then, in cache, once more: a vectorised pass
finds the extremes, a scalar pass counts. Neighbouring values share an exponent, so four tables take
turns; with one table each increment would wait for the one before it. ``comparing`` is faster where
it can be, and comes here where it cannot.

Numba's own threading stays off: its OpenMP layer kills forked children that count (DataLoader
workers), and its workqueue layer aborts when two threads count. Kernels release the GIL, and
``host`` runs them on threads of its own.

Values are float32 bit patterns, counted as ``layout`` says. With the sign shifted out, a zero wraps
to the last entry, and infinities and NaNs fall into known ones, from which the rare path takes them.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.compiled import compiled
from mpdiag.recording.counting.layout import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    FP16_OVERFLOW,
    INFS,
    NANS,
    QUARTERS,
    RAW,
    SUBNORMALS,
    ZEROS,
)
from mpdiag.recording.counting.vectors import as_bits, pointer

U = np.uint32
L = np.uint64

BLOCK = 4096
"""Values counted together: with what is made of them, they stay in the first-level cache."""
ODD = RAW
"""Entry after a raw row in scratch memory: NaNs that a table took for zeros."""
SCRATCH = RAW + 1
UPDATE_ROW = layout.RATIO_BINS + layout.UPDATE
"""Entries of scratch memory for an update: its ratios, then its facts."""
_TABLE = layout.TABLE
_MASK = U(layout.MAGNITUDE)
_INFINITY = U(layout.INFINITY)
_SUBNORMAL = U(layout.LARGEST_SUBNORMAL)
_OVERFLOW = U(layout.OVERFLOW)

TABLES_AT = 4 * BLOCK
WORK = TABLES_AT + 4 * 4 * _TABLE
"""Bytes of scratch memory: a block of float32, then four tables, which every kernel leaves at zero."""


@compiled(inline="always")
def limits_of(bits, n):  # type: ignore[no-untyped-def]
    """The smallest ``(bits << 1) - 1`` and the largest ``bits << 1``."""
    low, high = U(0xFFFFFFFF), U(0)
    for i in range(n):
        doubled = U(bits[i] << U(1))
        low = min(low, U(doubled - U(1)))
        high = max(high, doubled)
    return low, high


@compiled()
def rare_values(bits, n, row, extremes):  # type: ignore[no-untyped-def]
    """Find the extremes, and count what is rare: NaNs, infinities, subnormals, FP16's overflow."""
    for i in range(n):
        x = U(bits[i] & _MASK)
        if x > _INFINITY:
            row[NANS] += 1
            row[ODD] += x > U(0x7FE00000)  # those that share the zeros' entry
        elif x == _INFINITY:
            row[INFS] += 1
        elif x != U(0):
            extremes[0] = max(extremes[0], x)
            extremes[1] = min(extremes[1], x)
            if x >= _OVERFLOW:
                row[FP16_OVERFLOW] += 1
            elif x <= _SUBNORMAL:
                row[SUBNORMALS] += 1


@compiled()
def note_limits(bits, n, low, high, row, extremes):  # type: ignore[no-untyped-def]
    """Note the extremes of a block, whose values are looked at one by one only if some are rare."""
    largest = U(high >> U(1))
    smallest = U(U(low + U(1)) >> U(1))  # 0 where every value is zero
    if largest >= _OVERFLOW or (smallest <= _SUBNORMAL and smallest != U(0)):
        rare_values(bits, n, row, extremes)
    elif smallest != U(0):
        extremes[0] = max(extremes[0], largest)
        extremes[1] = min(extremes[1], smallest)


@compiled()
def tally(bits, n, tables):  # type: ignore[no-untyped-def]
    """Count one block of bit patterns into ``tables``."""
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


@compiled()
def collect(tables, row):  # type: ignore[no-untyped-def]
    """Add four tables to a raw row and clear them."""
    for i in range(QUARTERS):
        row[i] += (
            np.int64(tables[0, i]) + np.int64(tables[1, i]) + np.int64(tables[2, i]) + tables[3, i]
        )
    last = _TABLE - 1
    row[ZEROS] += (
        np.int64(tables[0, last]) + np.int64(tables[1, last]) + np.int64(tables[2, last])
    ) + tables[3, last]
    tables[:] = U(0)


@compiled(inline="always")
def finish(row, infs):  # type: ignore[no-untyped-def]
    """Move infinities (but the first ``infs``) out of the top quarter, odd NaNs out of the zeros."""
    row[QUARTERS - 1] -= row[INFS] - infs
    row[ZEROS] -= row[ODD]
    row[ODD] = 0


@compiled()
def _cut(longs, n, block, wide):  # type: ignore[no-untyped-def]
    """Magnitudes of float64 as float32 in the same quarters; notes the extremes.

    A value is cut to 24 bits with every lost bit gathered in the last ("sticky"), so that it stays
    on its side of each power of two. Beyond float32's range it counts as a subnormal below, in the
    top bin above. There are no branches, so that LLVM makes vectors of it.
    """
    zero, one, most = L(0), L(1), L(0xFFFFFFFFFFFFFFFF)
    infinity = L(0x7FF << 52)
    highest, lowest = zero, most
    for i in range(n):
        x = longs[i] & L(0x7FFFFFFFFFFFFFFF)
        finite = x < infinity
        highest = max(highest, x if finite else zero)
        lowest = min(lowest, x - one if finite else most)  # 0 becomes the largest
        kept = ((x >> L(29)) - L(896 << 23)) | (one if x & L(0x1FFFFFFF) != zero else zero)
        kept = kept if x >= L(897 << 52) else (one if x != zero else zero)
        kept = kept if x < L(1151 << 52) else L(0x7F7FFFFF)
        kept = kept if finite else (L(_INFINITY) if x == infinity else L(0x7FC00000))
        block[i] = U(kept)
    wide[0] = max(wide[0], highest)
    wide[1] = min(wide[1], lowest + one if lowest != most else most)


@compiled()
def widened(address, start, n, kind, block, wide):  # type: ignore[no-untyped-def]
    """Values of another type as float32 bit patterns.

    Args:
        address: Where the tensor lies.
        start: First value to take.
        n: How many.
        kind: ``BFLOAT16``, ``FLOAT16`` or ``FLOAT64``.
        block: uint32 (n or more,), written.
        wide: uint64 (2,), bit patterns of float64's extremes, updated.
    """
    if kind == FLOAT64:
        longs = carray(pointer(address + 8 * start), BLOCK, np.uint64)
        _cut(longs, n, block, wide)
        return
    halves = carray(pointer(address + 2 * start), BLOCK, np.uint16)
    if kind == BFLOAT16:
        for i in range(n):
            block[i] = U(U(halves[i]) << U(16))
        return
    for i in range(n):
        x = U(halves[i]) & U(0x7FFF)
        normal = U(U(x << U(13)) + U(112 << 23))
        normal = U(normal | _INFINITY) if x >= U(0x7C00) else normal
        # A subnormal is so many times 2^-24.
        small = as_bits(np.float32(np.int32(x & U(0x3FF))) * np.float32(2.0**-24))
        block[i] = small if x < U(0x400) else normal


@compiled(inline="always")
def clear_edges(extremes, wide):  # type: ignore[no-untyped-def]
    """Set extremes to what they are before anything was counted: largest 0, smallest all ones."""
    extremes[0], extremes[1] = U(0), U(0xFFFFFFFF)
    wide[0], wide[1] = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled(inline="always")
def note_edges(kind, extremes, wide, edges):  # type: ignore[no-untyped-def]
    """Take bit patterns of extremes into ``edges``, float64 (2,): 0 and infinity if there are none."""
    if kind == FLOAT64:
        if wide[0] != np.uint64(0):
            floats = wide.view(np.float64)
            edges[0], edges[1] = max(edges[0], floats[0]), min(edges[1], floats[1])
    elif extremes[0] != U(0):
        singles = extremes.view(np.float32)
        edges[0] = max(edges[0], np.float64(singles[0]))
        edges[1] = min(edges[1], np.float64(singles[1]))


@compiled()
def count_values(address, n, kind, row, edges, work):  # type: ignore[no-untyped-def]
    """Add values to a raw row.

    Args:
        address: Where they lie, flat and dense.
        n: How many.
        kind: Their type, as in ``layout``.
        row: int64 (``SCRATCH``,), added to.
        edges: float64 (2,), the largest and smallest non-zero finite |x| so far, updated.
        work: uint8 (``WORK``,).
    """
    block = work[:TABLES_AT].view(np.uint32)
    tables = work[TABLES_AT:WORK].view(np.uint32).reshape(4, _TABLE)
    extremes, wide = np.empty(2, np.uint32), np.empty(2, np.uint64)
    clear_edges(extremes, wide)
    infs, tallied = row[INFS], 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        if kind == FLOAT32:
            bits = carray(pointer(address + 4 * start), BLOCK, np.uint32)
        else:
            widened(address, start, m, kind, block, wide)
            bits = block
        low, high = limits_of(bits, m)
        tally(bits, m, tables)
        note_limits(bits, m, low, high, row, extremes)
        tallied += m
        if tallied >= 1 << 30:  # before an entry of 32 bits is full
            collect(tables, row)
            infs, tallied = row[INFS], 0
    collect(tables, row)
    finish(row, infs)
    note_edges(kind, extremes, wide, edges)


@compiled(inline="always")
def occupied(row, length):  # type: ignore[no-untyped-def]
    """Where the first ``length`` entries are not zero: the first one, and one past the last."""
    first, stop = 0, length
    while first < length and row[first] == 0:
        first += 1
    while stop > first and row[stop - 1] == 0:
        stop -= 1
    return first, stop


@compiled()
def keep(row, body, i, places, cells, tails):  # type: ignore[no-untyped-def]
    """Move a row from scratch memory into the packed ones, and leave zeros there.

    Args:
        row: int64, ``body`` entries of which one stretch is kept, then those kept whatever they are.
        body: Length of the first part.
        i: The row's number.
        places: int64 (rows, 3), written: where the stretch lies, its first entry, one past its last.
        cells: int64, stretches one after the other, with room for ``body`` more.
        tails: int64 (rows, tail), written.
    """
    start = 0 if i == 0 else places[i - 1, 0] + places[i - 1, 2] - places[i - 1, 1]
    first, stop = occupied(row, body)
    places[i, 0], places[i, 1], places[i, 2] = start, first, stop
    for j in range(first, stop):
        cells[start + j - first] = row[j]
        row[j] = 0
    for j in range(tails.shape[1]):
        tails[i, j] = row[body + j]
        row[body + j] = 0
    return start + stop - first


@compiled()
def unpack(indices, body, places, cells, tails, rows):  # type: ignore[no-untyped-def]
    """Write packed rows as they were into ``rows``, int64 (n, width), zeros, as far as they go."""
    for n in range(indices.size):
        i = indices[n]
        start, first, stop = places[i, 0], places[i, 1], places[i, 2]
        for j in range(first, stop):
            rows[n, j] = cells[start + j - first]
        for j in range(min(tails.shape[1], rows.shape[1] - body)):
            rows[n, body + j] = tails[i, j]


@compiled()
def bin_quarters(places, cells, lowest, counts, sums):  # type: ignore[no-untyped-def]
    """Add packed quarters to bins, a value as its quarter's middle over 2^e.

    Args:
        places: int64 (n, 3), as ``keep`` writes them.
        cells: int64, stretches one after the other.
        lowest: Number of the first bin.
        counts: int64 (n, bins), added to.
        sums: float64 (n, bins), added to.
    """
    for n in range(len(places)):
        start, first, stop = places[n, 0], places[n, 1], places[n, 2]
        for j in range(first, stop):
            found = cells[start + j - first]
            counts[n, (j >> 2) - lowest] += found
            sums[n, (j >> 2) - lowest] += found * (1.125 + 0.25 * (j & 3))


PLACES, CELLS, TAILS, EDGES, ROWS, USED, ROOM, CELL_ROOM = range(8)
"""Entries of a table of packed rows, int64 (8,): four addresses, rows and cells in use, and how many of
each there is room for."""
ROW_AT, EDGES_AT, WORK_AT, WORK_SIZE = range(4)
"""Entries of a table of scratch memory, int64 (4,): three addresses, and bytes of the last."""


@compiled()
def opened(scratch):  # type: ignore[no-untyped-def]
    """The arrays of scratch memory: a row, its extremes, and bytes to work in."""
    row = carray(pointer(scratch[ROW_AT]), SCRATCH, np.int64)
    edges = carray(pointer(scratch[EDGES_AT]), 2, np.float64)
    return row, edges, carray(pointer(scratch[WORK_AT]), scratch[WORK_SIZE], np.uint8)


@compiled()
def append(row, body, tail, table):  # type: ignore[no-untyped-def]
    """Keep a row, see ``keep``, where there is room; returns its number."""
    i = table[ROWS]
    places = carray(pointer(table[PLACES]), (table[ROOM], 3), np.int64)
    cells = carray(pointer(table[CELLS]), table[CELL_ROOM], np.int64)
    tails = carray(pointer(table[TAILS]), (table[ROOM], tail), np.int64)
    table[USED] = keep(row, body, i, places, cells, tails)
    table[ROWS] = i + 1
    return i


@compiled()
def append_row(scratch, table, repeat, zeros):  # type: ignore[no-untyped-def]
    """Keep a counted row of scratch memory, each value ``repeat`` times and ``zeros`` zeros more.

    Returns its number. There must be room.
    """
    row, edges, _ = opened(scratch)
    if repeat != 1:
        for j in range(RAW):
            row[j] *= repeat
    row[ZEROS] += zeros
    kept_edges = carray(pointer(table[EDGES]), (table[ROOM], 2), np.float64)
    kept_edges[table[ROWS], 0], kept_edges[table[ROWS], 1] = edges[0], edges[1]
    edges[0], edges[1] = 0.0, np.inf
    return append(row, QUARTERS, RAW - QUARTERS, table)


@compiled()
def count_row(address, n, kind, repeat, zeros, scratch, table):  # type: ignore[no-untyped-def]
    """``count_values``, then ``append_row``; returns the row's number, -1 where there is no room."""
    if table[ROWS] >= table[ROOM] or table[USED] + QUARTERS > table[CELL_ROOM]:
        return -1
    row, edges, work = opened(scratch)
    count_values(address, n, kind, row, edges, work)
    return append_row(scratch, table, repeat, zeros)


@compiled()
def count_rows(items, scratch, table):  # type: ignore[no-untyped-def]
    """``count_row`` of many tensors, int64 (k, 5); returns how many there was room for."""
    for i in range(len(items)):
        n, kind, repeat, zeros = items[i, 1], items[i, 2], items[i, 3], items[i, 4]
        if count_row(items[i, 0], n, kind, repeat, zeros, scratch, table) < 0:
            return i
    return len(items)
