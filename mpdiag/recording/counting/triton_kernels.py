"""Counting on CUDA: one launch for a tensor, and one for many tensors or weight updates.

Values are read where they lie, 16 bytes a thread and load, and kernels get addresses, so nothing is
compiled apart for where a tensor lies. Counts and extremes go into rows that exist already, by integer
atomics, so no order of execution shows. Zeros are not counted: they are what remains of a tensor (see
``device.DeviceRows.read``).

A thread increments nothing. It turns each value into a word with one bit set, the bit of its bin, and
adds words bit by bit with carry-save adders, two logic instructions a word: bit j of plane i is bit i
of the thread's count of bin j (positional population count: Klarqvist, Mula, Lemire, arXiv:1911.02696).
Eight planes hold the 224 or 248 values that a thread counts of a section. At its end the threads of the
program are added up, and one atomic add a bin goes to memory. Equal values meet in no conflict.

A word has 64 bits: 63 bins from just above the largest value of the section's first block, and one for
zeros and whatever lies outside. A block with values outside adds them one by one if they are few, else
by Triton's histogram, which costs three times as much.

What a value costs was counted in the code that ptxas emits; see ``docs/gpu.md``.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.tensors import KINDS
from mpdiag.recording.counting.torch_operations import PORTION, Counter

_FLOAT32, _BFLOAT16 = tl.constexpr(layout.FLOAT32), tl.constexpr(layout.BFLOAT16)
_FLOAT64 = tl.constexpr(layout.FLOAT64)

_RAW = tl.constexpr(layout.RAW)
_SUBNORMALS = tl.constexpr(layout.SUBNORMALS)
_INFS = tl.constexpr(layout.INFS)
_NANS = tl.constexpr(layout.NANS)
_FP16_OVERFLOW = tl.constexpr(layout.FP16_OVERFLOW)
_UPDATE = tl.constexpr(layout.UPDATE)
_RATIO_FIRST = tl.constexpr(layout.RATIO_FIRST)
_RATIO_BINS = tl.constexpr(layout.RATIO_BINS)
_CHANGED = tl.constexpr(layout.CHANGED)
_SWALLOWED_FP16 = tl.constexpr(layout.SWALLOWED_FP16)
_SWALLOWED_BF16 = tl.constexpr(layout.SWALLOWED_BF16)
_VANISHED_FP16 = tl.constexpr(layout.VANISHED_FP16)
_RATIO_ZEROS = tl.constexpr(layout.RATIO_ZEROS)
_MAGNITUDE = tl.constexpr(layout.MAGNITUDE)
_INFINITY = tl.constexpr(layout.INFINITY)
_LARGEST_SUBNORMAL = tl.constexpr(layout.LARGEST_SUBNORMAL)
_OVERFLOW = tl.constexpr(layout.OVERFLOW)
_NONE = tl.constexpr(0x7FFFFFFF)
"""In place of the smallest magnitude where there is none."""
_NOWHERE = tl.constexpr(1 << 20)
"""In place of the first bin of a word, and of the lowest key, where there is none."""
_LAST_BASE = tl.constexpr(layout.QUARTERS - 64)
"""The last quarter is not among those of a word: infinities have its key."""
_WIDE_INFINITY = tl.constexpr(0x7FF0000000000000)
_VANISHING = tl.constexpr(0x33000000)
"""2^-25: FP16 rounds it to zero, and all below."""

# ruff: noqa: N803


@triton.jit
def _loaded(origin, at, begin, stop, TYPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block from an address on; zeros before the values begin and after they stop.

    A block that is whole and lies on 16 bytes is read by them. Its pointer is one of its own, for
    what is said of a pointer's alignment holds for all that is read by it.
    """
    index = at + tl.arange(0, BLOCK)
    aligned = tl.multiple_of(origin.to(tl.pointer_type(TYPE)), 16)
    whole = (origin % 16 == 0) & (at >= begin) & (at + BLOCK <= stop)
    found = tl.load(aligned + index, mask=whole, other=0)
    if not whole:
        some = (index - begin).to(tl.uint32, bitcast=True) < (stop - begin)
        found = tl.load(origin.to(tl.pointer_type(TYPE)) + index, mask=some, other=0)
    return found


@triton.jit
def _bits(origin, at, begin, stop, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bit patterns of a block: of float32 values, or of the float64 values that they are."""
    if KIND == _FLOAT32:
        bits = _loaded(origin, at, begin, stop, tl.int32, BLOCK)
    elif KIND == _FLOAT64:
        bits = _loaded(origin, at, begin, stop, tl.int64, BLOCK)
    else:
        short = _loaded(origin, at, begin, stop, tl.int16, BLOCK)
        if KIND == _BFLOAT16:
            bits = short.to(tl.int32) << 16
        else:
            half = short.to(tl.float16, bitcast=True)
            bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _section(address, n, section, KIND: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A section of a tensor. The first one begins at the multiple of 16 bytes before the tensor.

    Returns:
        How far its address lies from the tensor's, in bytes; where the values begin in it and stop.
    """
    size: tl.constexpr = 4 if KIND == _FLOAT32 else 8 if KIND == _FLOAT64 else 2
    before = (address % 16) // size
    start = section * LENGTH
    begin = tl.maximum(before - start, 0).to(tl.int32)
    stop = tl.minimum(before + n - start, LENGTH).to(tl.int32)
    return start * size - address % 16, begin, stop


@triton.jit
def _cut(wide):  # type: ignore[no-untyped-def]
    """Magnitudes of float64 as those of float32; see ``torch_operations.as_float32``."""
    exponent = (wide >> 52) - 1023
    mantissa = wide & 0x000FFFFFFFFFFFFF
    head = ((exponent + 127) << 23) | (mantissa >> 29)
    head = head | tl.where((wide & 0x1FFFFFFF) != 0, 1, 0)
    head = tl.where(exponent < -126, 1, head)
    head = tl.where(exponent > 127, 0x7F7FFFFF, head)
    head = tl.where(wide == 0, 0, head)
    head = tl.where(exponent == 1024, tl.where(mantissa != 0, 0x7FC00000, _INFINITY), head)
    return head.to(tl.int32)


@triton.jit
def _add(place, number):  # type: ignore[no-untyped-def]
    """Add a number to one in memory, in no order."""
    tl.atomic_add(place, number.to(tl.int64), sem="relaxed")


@triton.jit
def _add_keys(keys, low, high, table):  # type: ignore[no-untyped-def]
    """Add to a table how often each key from low to high occurs, 127 of them at a time."""
    index = tl.arange(0, 128)
    for first in range(low, high + 1, 127):
        counted = tl.minimum((keys - first).to(tl.uint32, bitcast=True), 127)
        found = tl.histogram(counted.to(tl.int32, bitcast=True), 128)
        some = (found > 0) & (index < 127)
        tl.atomic_add(table + first + index, found.to(tl.int64), mask=some, sem="relaxed")


# -- counts of a thread, bit by bit ----------------------------------------------------------------


@triton.jit
def _halves(words, SIZE: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two halves of a tensor, so that no word leaves its thread: loads first, then neighbours of one.

    ``LINE`` is how many words a load of all threads brings.
    """
    if SIZE > LINE:
        pairs = tl.trans(tl.reshape(words, (2, SIZE // 2)))
    else:
        pairs = tl.reshape(words, (SIZE // 2, 2))
    return tl.split(pairs)


@triton.jit
def _full(a, b, c):  # type: ignore[no-untyped-def]
    """The sum and the carry of three bits, 64 times."""
    return a ^ b ^ c, (a & b) | (c & (a | b))


@triton.jit
def _add_two(words, ones, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = _halves(words, 2 * THREADS, LINE)
    return _full(ones, a, b)


@triton.jit
def _add_four(words, ones, twos, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = _halves(words, 4 * THREADS, LINE)
    ones, c = _add_two(a, ones, THREADS, LINE)
    ones, d = _add_two(b, ones, THREADS, LINE)
    twos, carry = _full(twos, c, d)
    return ones, twos, carry


@triton.jit
def _add_eight(words, ones, twos, fours, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = _halves(words, 8 * THREADS, LINE)
    ones, twos, c = _add_four(a, ones, twos, THREADS, LINE)
    ones, twos, d = _add_four(b, ones, twos, THREADS, LINE)
    fours, carry = _full(fours, c, d)
    return ones, twos, fours, carry


@triton.jit
def _add_sixteen(words, ones, twos, fours, eights, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = _halves(words, 16 * THREADS, LINE)
    ones, twos, fours, c = _add_eight(a, ones, twos, fours, THREADS, LINE)
    ones, twos, fours, d = _add_eight(b, ones, twos, fours, THREADS, LINE)
    eights, carry = _full(eights, c, d)
    return ones, twos, fours, eights, carry


@triton.jit
def _add_words(words, planes, SIZE: tl.constexpr, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add 8 or 32 words of each thread to its planes, from that of the ones to that of the 128s."""
    ones, twos, fours, eights, p16, p32, p64, p128 = planes
    if SIZE == 32 * THREADS:
        a, b = _halves(words, 32 * THREADS, LINE)
        ones, twos, fours, eights, c = _add_sixteen(a, ones, twos, fours, eights, THREADS, LINE)
        ones, twos, fours, eights, d = _add_sixteen(b, ones, twos, fours, eights, THREADS, LINE)
        p16, carry = _full(p16, c, d)
    else:
        ones, twos, fours, carry = _add_eight(words, ones, twos, fours, THREADS, LINE)
        eights, carry = eights ^ carry, eights & carry
        p16, carry = p16 ^ carry, p16 & carry
    p32, carry = p32 ^ carry, p32 & carry
    p64, carry = p64 ^ carry, p64 & carry
    return ones, twos, fours, eights, p16, p32, p64, p128 ^ carry


@triton.jit
def _no_planes(THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    zero = tl.zeros((THREADS,), tl.int64)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit
def _spread(plane, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bit k + 8i of a plane at its place in byte i of column k."""
    columns = tl.arange(0, 8).to(tl.int64)
    return ((plane[:, None] >> columns[None, :]) & 0x0101010101010101) << PLACE


@triton.jit
def _add_planes(planes, table):  # type: ignore[no-untyped-def]
    """Add what all threads counted to a table: bits 0 to 62, each one once."""
    ones, twos, fours, eights, p16, p32, p64, p128 = planes
    counts = _spread(ones, 0) | _spread(twos, 1) | _spread(fours, 2) | _spread(eights, 3)
    counts |= _spread(p16, 4) | _spread(p32, 5) | _spread(p64, 6) | _spread(p128, 7)
    # Bytes of a thread; 16 bits hold the sum of 255 over 257 threads.
    even = tl.sum(counts & 0x00FF00FF00FF00FF, 0)
    odd = tl.sum((counts >> 8) & 0x00FF00FF00FF00FF, 0)
    bins = tl.arange(0, 8)
    for i in tl.static_range(4):
        found = (even >> 16 * i) & 0xFFFF
        tl.atomic_add(table + (bins + 16 * i), found, mask=found > 0, sem="relaxed")
        found = (odd >> 16 * i) & 0xFFFF
        counted = (found > 0) & (bins + 16 * i < 48 + 7)
        tl.atomic_add(table + (bins + 16 * i + 8), found, mask=counted, sem="relaxed")


@triton.jit
def _sample(values, SIZE: tl.constexpr, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One value of each thread."""
    if SIZE > THREADS:
        values, _ = _halves(values, SIZE, LINE)
        values = _sample(values, SIZE // 2, THREADS, LINE)
    return values


@triton.jit
def _sum(values, SIZE: tl.constexpr, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each thread's values."""
    if SIZE > THREADS:
        a, b = _halves(values, SIZE, LINE)
        values = _sum(a + b, SIZE // 2, THREADS, LINE)
    return values


@triton.jit
def _add_each(keys, table, SIZE: tl.constexpr, THREADS: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add keys to a table one by one; those below 0 do not count."""
    if SIZE > THREADS:
        a, b = _halves(keys, SIZE, LINE)
        _add_each(a, table, SIZE // 2, THREADS, LINE)
        _add_each(b, table, SIZE // 2, THREADS, LINE)
    else:
        one = tl.full((THREADS,), 1, tl.int64)
        tl.atomic_add(table + keys, one, mask=keys >= 0, sem="relaxed")


@triton.jit
def _count_keys(  # type: ignore[no-untyped-def]
    keys,
    low,
    high,
    base,
    planes,
    table,
    LAST: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Count the keys of a block: into the planes those from the base on, into the table the others.

    Keys below 0 do not count. The base is chosen where there is none yet.
    """
    if (base == _NOWHERE) & (high >= 0):
        base = tl.minimum(tl.maximum(high + 2 - 62, 0), LAST)
    places = (keys - base).to(tl.uint32, bitcast=True)
    if (high > base + 62) | (low < base):
        left = tl.where(places > 62, keys, -1)
        if tl.sum(_sample((left >= 0).to(tl.int32), SIZE, THREADS, LINE)) <= THREADS // 32:
            _add_each(left, table, SIZE, THREADS, LINE)
        else:
            low = tl.where(low < base, low, base + 63)
            _add_keys(left, low, tl.where(high > base + 62, high, base - 1), table)
    words = tl.full((SIZE,), 1, tl.int64) << tl.minimum(places, 63).to(tl.int64)
    planes = _add_words(words, planes, SIZE, THREADS, LINE)
    return base, planes


@triton.jit
def _add_facts(magnitudes, counts):  # type: ignore[no-untyped-def]
    """Add what a row counts beside its bins; returns the finite magnitudes and their extremes."""
    high = tl.max(magnitudes)
    if high >= _OVERFLOW:
        finite = magnitudes < _INFINITY
        overflow = tl.where(finite & (magnitudes >= _OVERFLOW), 1, 0)
        found = tl.sum(overflow + tl.where(magnitudes > _INFINITY, 65536, 0))
        _add(counts + _FP16_OVERFLOW, found & 65535)
        _add(counts + _NANS, found >> 16)
        _add(counts + _INFS, tl.sum(tl.where(magnitudes == _INFINITY, 1, 0)))
        magnitudes = tl.where(finite, magnitudes, 0)
        high = tl.max(magnitudes)
    # Less one, a zero is the largest of all.
    low = tl.min((magnitudes - 1).to(tl.uint32, bitcast=True))
    low = tl.minimum(low, _NONE - 1).to(tl.int32, bitcast=True) + 1
    if low <= _LARGEST_SUBNORMAL:
        below = (magnitudes > 0) & (magnitudes <= _LARGEST_SUBNORMAL)
        _add(counts + _SUBNORMALS, tl.sum(below.to(tl.int32)))
    return magnitudes, high, low


@triton.jit
def _count_magnitudes(  # type: ignore[no-untyped-def]
    magnitudes, counts, base, planes, SIZE: tl.constexpr, THREADS: tl.constexpr, LINE: tl.constexpr
):
    """Count a block of float32 magnitudes; returns the finite ones and their extremes, too."""
    magnitudes, high, low = _add_facts(magnitudes, counts)
    base, planes = _count_keys(
        (magnitudes - 1) >> 21,  # below 0 for a zero
        tl.where(high > 0, (low - 1) >> 21, _NOWHERE),
        (high - 1) >> 21,
        base,
        planes,
        counts,
        _LAST_BASE,
        SIZE,
        THREADS,
        LINE,
    )
    return magnitudes, high, low, base, planes


@triton.jit
def _add_extremes(high, low, none, extremes):  # type: ignore[no-untyped-def]
    """Add the bit patterns of extremes to a row of them, where there are any."""
    if high > 0:
        tl.atomic_max(extremes, high.to(tl.int64), sem="relaxed")
    if low < none:
        tl.atomic_min(extremes + 1, low.to(tl.int64), sem="relaxed")


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    address,
    n,
    section,
    counts,
    extremes,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Count a section of a tensor into its row."""
    block: tl.constexpr = VALUES * THREADS
    line: tl.constexpr = (4 if KIND == _FLOAT32 else 2 if KIND == _FLOAT64 else 8) * THREADS
    offset, begin, stop = _section(address, n, section, KIND, 255 // VALUES * block)
    base, planes = _NOWHERE, _no_planes(THREADS)
    if KIND == _FLOAT64:
        top, bottom = tl.zeros((), tl.int64), tl.full((), _WIDE_INFINITY, tl.int64)
    else:
        top, bottom = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
    for at in range(0, stop, block):
        bits = _bits(address + offset, at, begin, stop, KIND, block)
        if KIND == _FLOAT64:
            bits = bits & 0x7FFFFFFFFFFFFFFF
            magnitudes = _cut(bits)
        else:
            magnitudes = bits & _MAGNITUDE
        magnitudes, high, low, base, planes = _count_magnitudes(
            magnitudes, counts, base, planes, block, THREADS, line
        )
        if KIND == _FLOAT64:
            high = tl.max(tl.where(bits < _WIDE_INFINITY, bits, 0))
            low = tl.min(tl.where(bits > 0, bits, _WIDE_INFINITY))
        top, bottom = tl.maximum(top, high), tl.minimum(bottom, low)
    if base < _NOWHERE:
        _add_planes(planes, counts + base)
    _add_extremes(top, bottom, _WIDE_INFINITY if KIND == _FLOAT64 else _NONE, extremes)


@triton.jit
def _bfloat16(bits):  # type: ignore[no-untyped-def]
    """float32 patterns rounded to bfloat16, to even; a NaN may come out as anything."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def _octaves(magnitudes):  # type: ignore[no-untyped-def]
    """float32 magnitudes with their exponent as if subnormals had one: patterns below zero."""
    small = magnitudes.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    return tl.where(magnitudes > _LARGEST_SUBNORMAL, magnitudes, small)


@triton.jit
def _ratio_keys(weights, updates, lowest):  # type: ignore[no-untyped-def]
    """Keys of |w|/|Δw| of finite magnitudes, each of (2^e, 2^(e+1)] that of e; -1 where there is none.

    ``lowest`` is the smallest of all magnitudes but zeros.
    """
    keys = (weights - updates - 1) >> 23
    if lowest <= _LARGEST_SUBNORMAL:
        old, moved = _octaves(weights), _octaves(updates)  # their difference may need 33 bits
        less = ((old & _LARGEST_SUBNORMAL) <= (moved & _LARGEST_SUBNORMAL)).to(tl.int32)
        keys = (old >> 23) - (moved >> 23) - less
    counted = tl.minimum(weights, updates) > 0
    keys = tl.where(counted, keys - _RATIO_FIRST, -1)
    low = tl.min(keys.to(tl.uint32, bitcast=True))
    return keys, tl.minimum(low, _NOWHERE).to(tl.int32, bitcast=True), tl.max(keys)


@triton.jit
def _swallowed(old_bits, change_bits):  # type: ignore[no-untyped-def]
    """Whether weights of FP16, and of BF16, stay as they are when a change is added."""
    half = old_bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.float32)
    change = change_bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.float32)
    in_fp16 = (half + change).to(tl.float16).to(tl.float32) == half
    brain = _bfloat16(old_bits).to(tl.float32, bitcast=True)
    change = _bfloat16(change_bits).to(tl.float32, bitcast=True)
    total = _bfloat16((brain + change).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    known = ((old_bits & _MAGNITUDE) <= _INFINITY) & ((change_bits & _MAGNITUDE) <= _INFINITY)
    # Infinity less infinity is NaN, which no rounding may turn into a number.
    known = known & ((brain + change) == (brain + change))
    return in_fp16, known & (total == brain)


@triton.jit
def _compare(  # type: ignore[no-untyped-def]
    before,
    after,
    n,
    section,
    counts,
    extremes,
    facts,
    ratios,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Count a section of an update: weights into one row, changes into the next, and its facts."""
    block: tl.constexpr = VALUES * THREADS
    line: tl.constexpr = (4 if KIND == _FLOAT32 else 2 if KIND == _FLOAT64 else 8) * THREADS
    # Both are read at the same offset: aligned differently, the new values are read one by one.
    offset, begin, stop = _section(before, n, section, KIND, 255 // VALUES * block)
    w_base, w_planes = _NOWHERE, _no_planes(THREADS)
    d_base, d_planes = _NOWHERE, _no_planes(THREADS)
    r_base, r_planes = _NOWHERE, _no_planes(THREADS)
    w_top, w_bottom = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
    d_top, d_bottom = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
    found = tl.zeros((THREADS,), tl.int32)
    beside = tl.zeros((THREADS,), tl.int32)
    for at in range(0, stop, block):
        old = _bits(before + offset, at, begin, stop, KIND, block)
        new = _bits(after + offset, at, begin, stop, KIND, block).to(tl.float32, bitcast=True)
        change = (new - old.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        weights, updates = old & _MAGNITUDE, change & _MAGNITUDE
        weights, w_high, w_low, w_base, w_planes = _count_magnitudes(
            weights, counts, w_base, w_planes, block, THREADS, line
        )
        w_top, w_bottom = tl.maximum(w_top, w_high), tl.minimum(w_bottom, w_low)
        updates, d_high, d_low, d_base, d_planes = _count_magnitudes(
            updates, counts + _RAW, d_base, d_planes, block, THREADS, line
        )
        d_top, d_bottom = tl.maximum(d_top, d_high), tl.minimum(d_bottom, d_low)
        keys, low, high = _ratio_keys(weights, updates, tl.minimum(w_low, d_low))
        r_base, r_planes = _count_keys(
            keys, low, high, r_base, r_planes, ratios, _RATIO_BINS - 63, block, THREADS, line
        )
        moved = (change & _MAGNITUDE) > 0
        swallowed16, swallowed_b = _swallowed(old, change)
        # A thread's counts are below 256, so three share a number.
        held = tl.where(swallowed16, 257, 1) + tl.where(swallowed_b, 65536, 0)
        found += _sum(tl.where(moved, held, 0), block, THREADS, line)
        gone = tl.where((change & _MAGNITUDE) <= _VANISHING, 1, 0)
        gone += tl.where((old & _MAGNITUDE) == 0, 256, 0)
        beside += _sum(tl.where(moved, gone, 0), block, THREADS, line)
    if w_base < _NOWHERE:
        _add_planes(w_planes, counts + w_base)
    if d_base < _NOWHERE:
        _add_planes(d_planes, counts + _RAW + d_base)
    if r_base < _NOWHERE:
        _add_planes(r_planes, ratios + r_base)
    _add_extremes(w_top, w_bottom, _NONE, extremes)
    _add_extremes(d_top, d_bottom, _NONE, extremes + 2)
    if d_top > 0:
        _add(facts + _CHANGED, tl.sum(found & 255))
        _add(facts + _SWALLOWED_FP16, tl.sum((found >> 8) & 255))
        _add(facts + _SWALLOWED_BF16, tl.sum(found >> 16))
        _add(facts + _VANISHED_FP16, tl.sum(beside & 255))
        _add(facts + _RATIO_ZEROS, tl.sum(beside >> 8))


@triton.jit
def _entry(table, entries, COLUMNS: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The entry of a table that this program serves: the last that begins no later than it."""
    program = tl.program_id(0).to(tl.int64)
    found, beyond = entries * 0, entries
    while beyond - found > 1:
        middle = (found + beyond) // 2
        if tl.load(table + middle * COLUMNS + FIRST) <= program:
            found = middle
        else:
            beyond = middle
    entry = table + found * COLUMNS
    return entry, program - tl.load(entry + FIRST)


# What is specialised is compiled apart, which takes seconds, in the middle of a training. So memory
# goes by address, its alignment is looked at by the program, and kernels differ by type alone.
@triton.jit(
    do_not_specialize=["address", "n"], do_not_specialize_on_alignment=["counts", "extremes"]
)
def one(  # type: ignore[no-untyped-def]
    address, n, counts, extremes, KIND: tl.constexpr, VALUES: tl.constexpr, THREADS: tl.constexpr
):
    """Count a tensor into its row, a section a program."""
    section = tl.program_id(0).to(tl.int64)
    size = n.to(tl.int64)
    _count(address, size, section, counts, extremes, KIND, VALUES, THREADS)


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table"])
def many(  # type: ignore[no-untyped-def]
    table,
    entries,
    counts,
    extremes,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Table: int64 (entries, 4), of size, address, row and first program."""
    entry, section = _entry(table, entries, 4, 3)
    n, address, row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    counts += row * _RAW
    extremes += row * 2
    _count(address, n, section, counts, extremes, KIND, VALUES, THREADS)


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table"])
def many_updates(  # type: ignore[no-untyped-def]
    table,
    entries,
    counts,
    extremes,
    facts,
    ratios,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Table: int64 (entries, 6), of size, two addresses, row, row of facts and first program."""
    entry, section = _entry(table, entries, 6, 5)
    n, before, after = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    row, fact = tl.load(entry + 3), tl.load(entry + 4)
    counts += row * _RAW
    extremes += row * 2
    facts += fact * _UPDATE
    ratios += fact * _RATIO_BINS
    _compare(before, after, n, section, counts, extremes, facts, ratios, KIND, VALUES, THREADS)


# -- launches --------------------------------------------------------------------------------------


_SIZES = {layout.FLOAT32: 4, layout.BFLOAT16: 2, layout.FLOAT16: 2, layout.FLOAT64: 8}
_WIDE = layout.FLOAT64


def options(kind: int, *, update: bool = False) -> dict[str, int]:
    """Constants and limits of a launch: values of a thread in a block, threads, warps, registers.

    With 168 registers an SM holds three programs, with 255 two; so none spills, and one program reads
    while others count. AMD's warps have twice the threads, and its compiler takes no limit.
    """
    found = {"KIND": kind, "VALUES": 8 if update or kind == _WIDE else 32, "THREADS": 128}
    if torch.version.hip is not None:
        return found | {"num_warps": 2}
    return found | {"num_warps": 4, "maxnreg": 255 if update else 168}


_OPTIONS = {kind: options(kind) for kind in KINDS.values()}
_compiled: dict[tuple[torch.device, int, bool, bool], Any] = {}
"""Kernel ``one`` for a device and a type, by whether its size and its address need 64 bits."""
_TAKES_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
"""Whether a compiled kernel is launched with its constants, too; Triton 3.2 wants it without."""


def variants() -> Iterator[tuple[str, int]]:
    """Each kernel by name with each type of values that it is compiled for."""
    for kind in KINDS.values():
        yield "one", kind
        yield "many", kind
        if kind != _WIDE:
            yield "many_updates", kind


def _programs(n: int, address: int, limits: dict[str, int]) -> int:
    """How many sections a tensor has, from the 16 bytes on that it begins in."""
    block = limits["VALUES"] * limits["THREADS"]
    values = n + address % 16 // _SIZES[limits["KIND"]]
    return -(-values // (255 // limits["VALUES"] * block))


def _count_values(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    for kind, part in _readable(values):
        n, address, limits = part.numel(), part.data_ptr(), _OPTIONS[kind]
        grid = (_programs(n, address, limits), 1, 1)
        # Triton compiles for the widths of integers; what it looks at beside them takes as long as
        # the launch itself, several times.
        key = part.device, kind, n >> 31 > 0, address >> 31 > 0
        with _on(part.device):
            compiled = _compiled.get(key)
            if compiled is not None:
                constants = limits["KIND"], limits["VALUES"], limits["THREADS"]
                compiled[grid](address, n, counts, extremes, *constants)
                continue
            launched = one[grid](address, n, counts, extremes, **limits)
            if _TAKES_CONSTANTS and launched is not None:
                _compiled[key] = launched


def _count_many(
    values: Sequence[torch.Tensor],
    rows: Sequence[int],
    counts: torch.Tensor,
    extremes: torch.Tensor,
) -> None:
    entries: dict[int, list[list[int]]] = {}
    for tensor, row in zip(values, rows, strict=True):
        kind = KINDS.get(tensor.dtype)
        if kind is None:
            _count_values(tensor, counts[row], extremes[row])
        else:
            entries.setdefault(kind, []).append([tensor.numel(), tensor.data_ptr(), row])
    for kind, some in entries.items():
        _launch(many, some, (counts, extremes), options(kind))


def _count_many_updates(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[tuple[int, int]],
    *into: torch.Tensor,
) -> None:
    entries: dict[int, list[list[int]]] = {}
    for (before, after), places in zip(pairs, rows, strict=True):
        kind = KINDS.get(before.dtype, _WIDE)
        if kind != _WIDE and before.dtype == after.dtype:
            entry = [before.numel(), before.data_ptr(), after.data_ptr(), *places]
            entries.setdefault(kind, []).append(entry)
            continue
        for old, new in zip(before.split(PORTION), after.split(PORTION), strict=True):
            old, new = old.float(), new.float()  # alive until it is launched
            entry = [old.numel(), old.data_ptr(), new.data_ptr(), *places]
            _launch(many_updates, [entry], into, options(layout.FLOAT32, update=True))
    for kind, some in entries.items():
        _launch(many_updates, some, into, options(kind, update=True))


def _launch(
    kernel: Any, entries: list[list[int]], into: tuple[torch.Tensor, ...], limits: dict[str, int]
) -> None:
    """Launch a kernel for many tensors of a type.

    Torch keeps page-locked memory for further use, once the copy from it is done; so the copy of the
    table waits for nothing and no buffer is overwritten under way.

    Args:
        kernel: ``many`` or ``many_updates``.
        entries: What each tensor is, its size and address first, without its first program, which is
            added.
        into: Where counts go.
        limits: Of the launch.
    """
    programs = 0
    for entry in entries:
        entry.append(programs)
        programs += _programs(entry[0], entry[1], limits)
    device = into[0].device
    pinned = device.type == "cuda"
    table = torch.tensor(entries, dtype=torch.int64, device="cpu", pin_memory=pinned)
    table = table.to(device, non_blocking=True)
    with _on(device):
        kernel[(programs,)](table, len(entries), *into, **limits)


COUNTER = Counter("Triton", _count_values, _count_many, _count_many_updates)
"""Counts by these kernels; waits for nothing."""


def _readable(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor of a type that kernels read, or its portions, copied one after another."""
    kind = KINDS.get(values.dtype)
    if kind is not None:
        yield kind, values
        return
    for part in values.split(PORTION):
        yield layout.FLOAT32, part.float()


def _on(device: torch.device) -> Any:
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)
