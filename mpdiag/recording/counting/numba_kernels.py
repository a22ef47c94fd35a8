"""Numba kernels that count on the CPU.

A block of values is read once from memory. In cache, one pass makes of each value the key of its
quarter of a power of two and finds the extremes, which LLVM vectorises; a second one counts the keys.
Neighbouring values share an exponent, so four tables take turns: with one table each increment would
wait for the one before it.

Numba's own threading stays off: its OpenMP layer kills forked children that count (DataLoader
workers), and its workqueue layer aborts when two threads count. Kernels release the GIL, and
``host`` runs them on threads of its own.

Values are float32 bit patterns, counted as ``layout`` says. With the sign shifted out, a zero wraps
to the last entry, and infinities and NaNs fall into known ones, from which the rare path takes them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit
from numba.core import types
from numba.core.runtime.nrt import rtsys
from numba.np.numpy_support import carray

from mpdiag.recording.counting import layout

intrinsic: Any = extending.intrinsic  # numba's own types know no arguments of what it makes

U = np.uint32
L = np.uint64
F = np.float32

BLOCK = 4096
"""Values counted together: with what is made of them, they stay in the first-level cache."""
UPDATE_BLOCK = 2048
"""Weights of an update counted together, for the same reason."""
_ODD = layout.RAW
"""Entry after a raw row in scratch memory: NaNs that a table took for zeros."""
EDGES_AT = layout.RAW + 1
BLOCK_AT = EDGES_AT + 2
_KEYS_AT = BLOCK_AT + BLOCK // 2
_TABLES_AT = _KEYS_AT + BLOCK // 4
_RATIOS_AT = _TABLES_AT + 2 * layout.TABLE
SCRATCH = _RATIOS_AT + 2 * layout.TABLE
"""Length of scratch memory, int64: a raw row, its extremes, a block of float32, keys of 16 bits, and
twice four tables of 32 bits. Between two rows all is zero, but for the smaller extreme, infinity."""
UPDATE_ROW = layout.RATIO_BINS + layout.UPDATE
"""Entries of scratch memory for the facts of an update: its ratios, then its facts."""
_MASK = U(layout.MAGNITUDE)
_INFINITY = U(layout.INFINITY)
_SUBNORMAL = U(layout.LARGEST_SUBNORMAL)
_OVERFLOW = U(layout.OVERFLOW)
_MOST, _MOST_WIDE = U(0xFFFFFFFF), L(0xFFFFFFFFFFFFFFFF)
_NONE = np.uint16(layout.TABLE - 1)
"""The key of a ratio that is none."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compiled by Numba at the first call, and kept on the disk for the next process."""

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            made = njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # an install and a home that may not be written, as in containers
            return njit(nogil=True, **options)(function)
        # Numba keeps what it compiled by the date of the function's own file; kernels here are made
        # of several. Where a release of Numba has no such attribute, only its own check is left.
        with suppress(AttributeError):
            made._cache._cache_file._source_stamp = _stamp(function.__code__.co_filename)
            _load_alone(made._cache)
        return made

    return wrap


def _load_alone(kept: Any) -> None:
    """Make a function's cache load what was compiled without all that Numba could compile.

    Before it looks for a kept function, Numba imports what it knows of Python, NumPy and SciPy and
    makes a template of each: 0.8 s, for a function whose machine code is there. That needs only the
    symbols of Numba's allocator. Where nothing was kept, the compiler imports all the same.

    Args:
        kept: The ``_cache`` of a function that Numba compiles.

    Raises:
        AttributeError: If this Numba keeps functions in another way.
    """
    load, look, guard = (
        kept.load_overload,
        kept._load_overload,
        kept._guard_against_spurious_io_errors,
    )

    def load_overload(signature: Any, target: Any) -> Any:
        found = None  # then it is compiled
        try:
            rtsys.initialize(target)
            with guard():
                found = look(signature, target)
        except Exception:  # noqa: BLE001 - Numba's own way says what is wrong
            found = load(signature, target)
        return found

    kept.load_overload = load_overload


@cache
def _stamp(own: str) -> tuple[tuple[float, int], ...]:
    """Date and size of every file that a kernel of a file may be made of."""
    stats = [Path(file).stat() for file in (own, __file__, layout.__file__)]
    return tuple((stat.st_mtime, stat.st_size) for stat in stats)


@intrinsic
def pointer(_typing: Any, address: Any) -> tuple[Any, Any]:
    """An address as a pointer, from which ``numba.carray`` makes an array."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@intrinsic
def as_bits(_typing: Any, value: Any) -> tuple[Any, Any]:
    """The bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(value), generate


@intrinsic
def as_float(_typing: Any, bits: Any) -> tuple[Any, Any]:
    """The float32, or float64, of a bit pattern."""
    wide = bits.bitwidth == 64

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType() if wide else ir.FloatType())

    return (types.float64 if wide else types.float32)(bits), generate


# -- values ----------------------------------------------------------------------------------------


@compiled()
def _keys_of(bits, n, keys):  # type: ignore[no-untyped-def]
    """Write each value's quarter; returns the smallest ``(bits << 1) - 1``, largest ``bits << 1``."""
    low, high = _MOST, U(0)
    for i in range(n):
        doubled = U(bits[i] << U(1))
        moved = U(doubled - U(1))
        low, high = min(low, moved), max(high, doubled)
        keys[i] = np.uint16(moved >> U(22))
    return low, high


@compiled()
def _tally(keys, n, tables):  # type: ignore[no-untyped-def]
    """Count keys into ``tables``, uint32 (4, TABLE)."""
    four = n // 4 * 4
    for i in range(0, four, 4):
        for way in range(4):
            tables[way, np.uint64(keys[np.uint64(i + way)])] += U(1)
    for i in range(four, n):
        tables[0, np.uint64(keys[np.uint64(i)])] += U(1)


@compiled()
def _collect(tables, row, length):  # type: ignore[no-untyped-def]
    """Add the first entries of four tables to a row, and clear all; returns what the last one held."""
    for i in range(length):
        row[i] += (
            np.int64(tables[0, i]) + np.int64(tables[1, i]) + np.int64(tables[2, i]) + tables[3, i]
        )
    last = layout.TABLE - 1
    zeros = (
        np.int64(tables[0, last]) + np.int64(tables[1, last]) + np.int64(tables[2, last])
    ) + tables[3, last]
    tables[:] = U(0)
    return zeros


@compiled()
def _rare_values(bits, n, row):  # type: ignore[no-untyped-def]
    """Count what is rare: NaNs, infinities, subnormals, FP16's overflow; returns as ``_count_block``."""
    nans, odd, infs, over, small = U(0), U(0), U(0), U(0), U(0)
    high, low = U(0), _MOST
    for i in range(n):
        x = U(bits[i] & _MASK)
        finite = x < _INFINITY
        nans = U(nans + U(x > _INFINITY))
        odd = U(odd + U(x > U(0x7FE00000)))  # those that share the zeros' entry
        infs = U(infs + U(x == _INFINITY))
        over = U(over + U(finite & (x >= _OVERFLOW)))
        small = U(small + U(U(x - U(1)) < _SUBNORMAL))
        high = max(high, x if finite else U(0))
        low = min(low, U(x - U(1)) if finite else _MOST)  # 0 becomes the largest
    row[layout.NANS] += nans
    row[_ODD] += odd
    row[layout.INFS] += infs
    row[layout.QUARTERS - 1] -= infs  # the entry that they fall into
    row[layout.FP16_OVERFLOW] += over
    row[layout.SUBNORMALS] += small
    return high, U(low + U(1)) if low != _MOST else _MOST


@compiled()
def _count_block(bits, n, keys, tables, row):  # type: ignore[no-untyped-def]
    """Count one block of bit patterns.

    Returns the largest finite magnitude and the smallest that is not zero: 0 and all ones if there
    are none.
    """
    low, high = _keys_of(bits, n, keys)
    _tally(keys, n, tables)
    largest, smallest = U(high >> U(1)), U(U(low + U(1)) >> U(1))
    if largest >= _OVERFLOW or (smallest <= _SUBNORMAL and smallest != U(0)):
        largest, smallest = _rare_values(bits, n, row)
    elif smallest == U(0):  # every value is zero
        smallest = _MOST
    return largest, smallest


@compiled()
def _cut(longs, n, block):  # type: ignore[no-untyped-def]
    """Magnitudes of float64 as float32 in the same quarters; returns their extremes.

    A value is cut to 24 bits with every lost bit gathered in the last ("sticky"), so that it stays
    on its side of each power of two. Beyond float32's range it counts as a subnormal below, in the
    top bin above. There are no branches, so that LLVM makes vectors of it.
    """
    zero, one = L(0), L(1)
    infinity = L(0x7FF << 52)
    highest, lowest = zero, _MOST_WIDE
    for i in range(n):
        x = longs[i] & L(0x7FFFFFFFFFFFFFFF)
        finite = x < infinity
        highest = max(highest, x if finite else zero)
        lowest = min(lowest, x - one if finite else _MOST_WIDE)  # 0 becomes the largest
        kept = ((x >> L(29)) - L(896 << 23)) | (one if x & L(0x1FFFFFFF) != zero else zero)
        kept = kept if x >= L(897 << 52) else (one if x != zero else zero)
        kept = kept if x < L(1151 << 52) else L(0x7F7FFFFF)
        kept = kept if finite else (L(_INFINITY) if x == infinity else L(0x7FC00000))
        block[i] = U(kept)
    return highest, lowest + one if lowest != _MOST_WIDE else _MOST_WIDE


@compiled()
def _widened(halves, n, kind, block):  # type: ignore[no-untyped-def]
    """Values of 16 bits as float32 bit patterns, written to ``block``."""
    if kind == layout.BFLOAT16:
        for i in range(n):
            block[i] = U(U(halves[i]) << U(16))
        return
    for i in range(n):
        x = U(halves[i]) & U(0x7FFF)
        normal = U(U(x << U(13)) + U(112 << 23))
        normal = U(normal | _INFINITY) if x >= U(0x7C00) else normal
        # A subnormal is so many times 2^-24.
        small = as_bits(F(np.int32(x & U(0x3FF))) * F(2.0**-24))
        block[i] = small if x < U(0x400) else normal


@compiled()
def _opened(scratch):  # type: ignore[no-untyped-def]
    """The arrays of scratch memory: extremes, a block, keys, and tables."""
    edges = scratch[EDGES_AT:BLOCK_AT].view(np.float64)
    block = scratch[BLOCK_AT:_KEYS_AT].view(np.uint32)
    keys = scratch[_KEYS_AT:_TABLES_AT].view(np.uint16)
    return (
        edges,
        block,
        keys,
        scratch[_TABLES_AT:_RATIOS_AT].view(np.uint32).reshape(4, layout.TABLE),
    )


@compiled()
def _finish(scratch, tables):  # type: ignore[no-untyped-def]
    """Add tables to the row of scratch memory; NaNs that they took for zeros are none."""
    zeros = _collect(tables, scratch, layout.QUARTERS)
    scratch[layout.ZEROS] += zeros - scratch[_ODD]
    scratch[_ODD] = 0


@compiled()
def count_values(address, n, kind, scratch):  # type: ignore[no-untyped-def]
    """Add values to the row and the extremes in scratch memory.

    Args:
        address: Where they lie, flat and dense.
        n: How many.
        kind: Their type, as in ``layout``.
        scratch: int64 (``SCRATCH``,), added to.
    """
    edges, block, keys, tables = _opened(scratch)
    high, low = U(0), _MOST
    high_wide, low_wide = L(0), _MOST_WIDE
    tallied = 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        bits = block
        if kind == layout.FLOAT32:
            bits = carray(pointer(address + 4 * start), BLOCK, np.uint32)
        elif kind == layout.FLOAT64:
            longs = carray(pointer(address + 8 * start), BLOCK, np.uint64)
            highest, lowest = _cut(longs, m, block)
            high_wide, low_wide = max(high_wide, highest), min(low_wide, lowest)
        else:
            halves = carray(pointer(address + 2 * start), BLOCK, np.uint16)
            _widened(halves, m, kind, block)
        largest, smallest = _count_block(bits, m, keys, tables, scratch)
        high, low = max(high, largest), min(low, smallest)
        tallied += m
        if tallied >= 1 << 30:  # before an entry of 32 bits is full
            _finish(scratch, tables)
            tallied = 0
    _finish(scratch, tables)
    if kind == layout.FLOAT64:
        if high_wide != L(0):
            edges[0] = max(edges[0], as_float(high_wide))
            edges[1] = min(edges[1], as_float(low_wide))
    else:
        _note_edges(edges, high, low)


@compiled(inline="always")
def _note_edges(edges, high, low):  # type: ignore[no-untyped-def]
    """Take bit patterns of float32 extremes into ``edges``, float64 (2,), if there are any."""
    if high != U(0):
        edges[0] = max(edges[0], np.float64(as_float(high)))
        edges[1] = min(edges[1], np.float64(as_float(low)))


# -- weight updates --------------------------------------------------------------------------------


@compiled(inline="always")
def _fp16(bits):  # type: ignore[no-untyped-def]
    """A float32 rounded to FP16, infinities included.

    Rounded by adding and taking away one and a half times a power of two, with FP16's spacing at that
    size: the sum keeps that exponent, whatever the value's sign.
    """
    value = as_float(bits)
    magic = as_float(U(max(U(bits & _INFINITY), U(113 << 23)) + U((13 << 23) + (1 << 22))))
    rounded = F(F(value + magic) - magic)
    return rounded if abs(value) < F(65520.0) else F(value * F(np.inf))


@compiled(inline="always")
def _bf16(bits):  # type: ignore[no-untyped-def]
    """A float32 rounded to BF16: the upper half of its bits, to nearest even. Some NaNs become 0."""
    return as_float(U(U(U(bits + U(0x7FFF)) + U(U(bits >> U(16)) & U(1))) & U(0xFFFF0000)))


@compiled()
def _note_facts(w_bits, d_bits, n, facts):  # type: ignore[no-untyped-def]
    """Count the changed, and those of which FP16 or BF16 weights would not have taken the update."""
    changed, vanished, swallowed, swallowed_b = U(0), U(0), U(0), U(0)
    for i in range(n):
        w, d = w_bits[i], d_bits[i]
        weight, change = as_float(w), as_float(d)
        moved = change != F(0)
        half, half_d = _fp16(w), _fp16(d)
        total = _fp16(as_bits(F(half + half_d)))
        brain = _bf16(w)
        total_b = _bf16(as_bits(F(brain + _bf16(d))))
        numbers = (weight == weight) & (change == change)  # no NaN
        changed = U(changed + U(moved))
        vanished = U(vanished + U(moved & (half_d == F(0))))
        swallowed = U(swallowed + U(moved & (total == half)))
        swallowed_b = U(swallowed_b + U(moved & numbers & (total_b == brain)))
    facts[layout.RATIO_BINS + layout.CHANGED] += changed
    facts[layout.RATIO_BINS + layout.VANISHED_FP16] += vanished
    facts[layout.RATIO_BINS + layout.SWALLOWED_FP16] += swallowed
    facts[layout.RATIO_BINS + layout.SWALLOWED_BF16] += swallowed_b


@compiled(inline="always")
def _octaves(bits):  # type: ignore[no-untyped-def]
    """Bits of a float32 magnitude with its exponent raised by 149, so that subnormals have one."""
    return U(bits + U(149 << 23)) if bits > _SUBNORMAL else as_bits(F(np.int32(bits)))


@compiled()
def _ratio_keys(w_bits, d_bits, n, keys):  # type: ignore[no-untyped-def]
    """Write exponents of |w|/|Δw| as keys; returns how many weights were zero before they changed.

    The exponent comes of those of both, less one where w's mantissa is not the larger: no division,
    and exact at powers of two. Infinities and NaNs have no ratio.
    """
    zeros, mantissa = U(0), _SUBNORMAL
    for i in range(n):
        w, d = U(w_bits[i] & _MASK), U(d_bits[i] & _MASK)
        zeros = U(zeros + U((w == U(0)) & (d != U(0))))
        counted = (w != U(0)) & (d != U(0)) & (max(w, d) < _INFINITY)
        old, moved = _octaves(w), _octaves(d)
        exponent = U(U(old >> U(23)) - U(moved >> U(23)))
        less = U((old & mantissa) <= (moved & mantissa))
        key = U(U(exponent + U(-layout.RATIO_FIRST)) - less)
        keys[i] = np.uint16(key) if counted else _NONE
    return zeros


@compiled()
def count_update(before, after, n, w_scratch, d_scratch, facts):  # type: ignore[no-untyped-def]
    """Count weights, updates and what FP16 and BF16 weights would have made of them, in one pass.

    Args:
        before: Where the float32 weights lie that the step started from.
        after: Where those lie that it left.
        n: How many.
        w_scratch: int64 (``SCRATCH``,), for the weights before; added to.
        d_scratch: int64 (``SCRATCH``,), for after - before; added to.
        facts: int64 (``UPDATE_ROW``,): changed weights by |w|/|Δw| in (2^e, 2^(e+1)], then facts.
    """
    w_edges, _, keys, w_tables = _opened(w_scratch)
    d_edges, d_bits, _, d_tables = _opened(d_scratch)
    delta = d_bits.view(np.float32)
    ratios = d_scratch[_RATIOS_AT:SCRATCH].view(np.uint32).reshape(4, layout.TABLE)
    w_high, w_low, d_high, d_low = U(0), _MOST, U(0), _MOST
    tallied = 0
    for start in range(0, n, UPDATE_BLOCK):
        m = min(UPDATE_BLOCK, n - start)
        old = carray(pointer(before + 4 * start), UPDATE_BLOCK, np.float32)
        new = carray(pointer(after + 4 * start), UPDATE_BLOCK, np.float32)
        w_bits = carray(pointer(before + 4 * start), UPDATE_BLOCK, np.uint32)
        for i in range(m):
            delta[i] = new[i] - old[i]
        largest, smallest = _count_block(w_bits, m, keys, w_tables, w_scratch)
        w_high, w_low = max(w_high, largest), min(w_low, smallest)
        largest, smallest = _count_block(d_bits, m, keys, d_tables, d_scratch)
        d_high, d_low = max(d_high, largest), min(d_low, smallest)
        _note_facts(w_bits, d_bits, m, facts)
        facts[layout.RATIO_BINS + layout.RATIO_ZEROS] += _ratio_keys(w_bits, d_bits, m, keys)
        _tally(keys, m, ratios)
        tallied += m
        if tallied >= 1 << 30:  # before an entry of 32 bits is full
            _finish(w_scratch, w_tables)
            _finish(d_scratch, d_tables)
            _collect(ratios, facts, layout.RATIO_BINS)
            tallied = 0
    _finish(w_scratch, w_tables)
    _finish(d_scratch, d_tables)
    _collect(ratios, facts, layout.RATIO_BINS)
    _note_edges(w_edges, w_high, w_low)
    _note_edges(d_edges, d_high, d_low)


@compiled()
def _move(scratch, row, edges):  # type: ignore[no-untyped-def]
    """Move a row and its extremes out of scratch memory."""
    row[:] = scratch[: layout.RAW]
    scratch[: layout.RAW] = 0
    found = _opened(scratch)[0]
    edges[:] = found
    found[0], found[1] = 0.0, np.inf


@compiled()
def count_row(address, n, kind, repeat, zeros, scratch, rows, edges, i):  # type: ignore[no-untyped-def]
    """``count_values``, each ``repeat`` times and ``zeros`` zeros more, then written to a row.

    Args:
        address: Where the values lie.
        n: How many.
        kind: Their type.
        repeat: How often each counts.
        zeros: Further zeros.
        scratch: int64 (``SCRATCH``,).
        rows: int64 (m, ``RAW``), of which one is written.
        edges: float64 (m, 2), likewise: its extremes.
        i: The row's number.
    """
    count_values(address, n, kind, scratch)
    _move(scratch, rows[i], edges[i])
    if repeat != 1:
        for j in range(layout.RAW):
            rows[i, j] *= repeat
    rows[i, layout.ZEROS] += zeros


@compiled()
def count_rows(items, scratch, rows, edges):  # type: ignore[no-untyped-def]
    """``count_row`` of many tensors, int64 (k, 5), into as many rows."""
    for i in range(len(items)):
        n, kind, repeat, zeros = items[i, 1], items[i, 2], items[i, 3], items[i, 4]
        count_row(items[i, 0], n, kind, repeat, zeros, scratch, rows, edges, i)


@compiled()
def count_updates(pairs, w_scratch, d_scratch, rows, edges, facts):  # type: ignore[no-untyped-def]
    """``count_update`` of many weights.

    Args:
        pairs: int64 (k, 3): where float32 weights lie before a step, where after it, how many.
        w_scratch: Scratch memory.
        d_scratch: Another one.
        rows: int64 (2 k, ``RAW``), written: of each its weights, then its updates.
        edges: float64 (2 k, 2), written.
        facts: int64 (k, ``UPDATE_ROW``), zeros, added to.
    """
    for i in range(len(pairs)):
        count_update(pairs[i, 0], pairs[i, 1], pairs[i, 2], w_scratch, d_scratch, facts[i])
        _move(w_scratch, rows[2 * i], edges[2 * i])
        _move(d_scratch, rows[2 * i + 1], edges[2 * i + 1])
