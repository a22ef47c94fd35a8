"""Counting on CUDA: one launch for a tensor, and one for many tensors or weight updates.

Values are read where they lie, whatever their type, and kernels get addresses, so nothing is compiled
apart for where a tensor lies. Counts and extremes go into rows that exist already, by integer atomics,
so nothing is allocated and no order of execution shows. Zeros are not counted: they are what remains
of a tensor (see ``device.DeviceRows.read``).

Triton's histogram costs instructions by its number of bins: every bit of a key is a vote of the warp,
and every 32 bins a population count. For 16 values of a thread, compiled for sm_90: 64 bins take 96
votes and 32 population counts, 1,024 bins 160 and 512. So a block counts into 64 bins from its own
smallest value on, where these hold all, else into 128 at a time. Equal keys (a ReLU's zeros are none)
meet in no conflict, for a warp adds its whole table to the one in shared memory.

By the instructions that ptxas emits, about 45 a value, an H200 should count FP32 at a third of its copy
bandwidth: an estimate, which ``make gpu`` settles (a-speed). Triton has no atomics in shared memory,
which would take some six.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.tensors import KINDS
from mpdiag.recording.counting.torch_operations import Counter

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
_WIDE_INFINITY = tl.constexpr(0x7FF0000000000000)
_VANISHING = tl.constexpr(0x33000000)
"""2^-25: FP16 rounds it to zero, and all below."""

# ruff: noqa: N803


@triton.jit
def _loaded(pointer, aligned, start, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of a tensor, zeros past its end; 128 bits a load where it lies on 16 bytes."""
    index = tl.arange(0, BLOCK)
    places = pointer + start + index
    left = n - start
    if aligned & (left >= BLOCK):
        found = tl.load(tl.multiple_of(places, 16))
    else:
        found = tl.load(places, mask=index < tl.minimum(left, BLOCK).to(tl.int32), other=0)
    return found


@triton.jit
def _bits(address, start, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bit patterns of a block: of float32 values, or of the float64 values that they are."""
    aligned = address % 16 == 0
    if KIND == _FLOAT32:
        bits = _loaded(address.to(tl.pointer_type(tl.int32)), aligned, start, n, BLOCK)
    elif KIND == _FLOAT64:
        bits = _loaded(address.to(tl.pointer_type(tl.int64)), aligned, start, n, BLOCK)
    else:
        short = _loaded(address.to(tl.pointer_type(tl.int16)), aligned, start, n, BLOCK)
        if KIND == _BFLOAT16:
            bits = short.to(tl.int32) << 16
        else:
            half = short.to(tl.float16, bitcast=True)
            bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


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
def _add_table(keys, table, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to a table how often each key occurs; those below 0, or from ``BINS - 1`` on, do not."""
    counted = tl.minimum(keys.to(tl.uint32, bitcast=True), BINS - 1).to(tl.int32, bitcast=True)
    found = tl.histogram(counted, BINS)
    index = tl.arange(0, BINS)
    some = (found > 0) & (index < BINS - 1)
    tl.atomic_add(table + index, found.to(tl.int64), mask=some, sem="relaxed")


@triton.jit
def _add_keys(keys, low, high, table):  # type: ignore[no-untyped-def]
    """Add to a table how often each key from low to high occurs."""
    if high - low < 63:
        _add_table(keys - low, table + low, 64)
    else:
        for first in range(low, high + 1, 127):
            _add_table(keys - first, table + first, 128)


@triton.jit
def _add_values(magnitudes, counts):  # type: ignore[no-untyped-def]
    """Add float32 magnitudes to a row of counts; returns the extremes of the finite ones."""
    high = tl.max(magnitudes)
    if high >= _OVERFLOW:
        finite = magnitudes < _INFINITY
        _add(counts + _INFS, tl.sum((magnitudes == _INFINITY).to(tl.int32)))
        _add(counts + _NANS, tl.sum((magnitudes > _INFINITY).to(tl.int32)))
        _add(counts + _FP16_OVERFLOW, tl.sum((finite & (magnitudes >= _OVERFLOW)).to(tl.int32)))
        magnitudes = tl.where(finite, magnitudes, 0)
        high = tl.max(magnitudes)
    low = tl.min(tl.where(magnitudes > 0, magnitudes, _NONE))
    if low <= _LARGEST_SUBNORMAL:
        below = (magnitudes > 0) & (magnitudes <= _LARGEST_SUBNORMAL)
        _add(counts + _SUBNORMALS, tl.sum(below.to(tl.int32)))
    if high > 0:  # the key of a zero is below 0
        _add_keys((magnitudes - 1) >> 21, (low - 1) >> 21, (high - 1) >> 21, counts)
    return high, low


@triton.jit
def _add_extremes(high, low, none, extremes):  # type: ignore[no-untyped-def]
    """Add the bit patterns of extremes to a row of them, where there are any."""
    if high > 0:
        tl.atomic_max(extremes, high.to(tl.int64), sem="relaxed")
    if low < none:
        tl.atomic_min(extremes + 1, low.to(tl.int64), sem="relaxed")


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    address, n, start, stop, stride, counts, extremes, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Count some blocks of a tensor into its row."""
    if KIND == _FLOAT64:
        high, low = tl.zeros((), tl.int64), tl.full((), _WIDE_INFINITY, tl.int64)
        for at in range(start, stop, stride):
            wide = _bits(address, at, n, KIND, BLOCK) & 0x7FFFFFFFFFFFFFFF
            _add_values(_cut(wide), counts)
            high = tl.maximum(high, tl.max(tl.where(wide < _WIDE_INFINITY, wide, 0)))
            low = tl.minimum(low, tl.min(tl.where(wide > 0, wide, _WIDE_INFINITY)))
        _add_extremes(high, low, _WIDE_INFINITY, extremes)
    else:
        top, bottom = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
        for at in range(start, stop, stride):
            magnitudes = _bits(address, at, n, KIND, BLOCK) & _MAGNITUDE
            highest, lowest = _add_values(magnitudes, counts)
            top, bottom = tl.maximum(top, highest), tl.minimum(bottom, lowest)
        _add_extremes(top, bottom, _NONE, extremes)


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
def _add_ratios(weights, updates, ratios):  # type: ignore[no-untyped-def]
    """Add |w|/|Δw| of magnitudes to a row of ratios, each to e of (2^e, 2^(e+1)]."""
    counted = (weights > 0) & (updates > 0) & (weights < _INFINITY) & (updates < _INFINITY)
    old, moved = _octaves(weights), _octaves(updates)  # their difference may need 33 bits
    less = ((old & _LARGEST_SUBNORMAL) <= (moved & _LARGEST_SUBNORMAL)).to(tl.int32)
    keys = (old >> 23) - (moved >> 23) - less - _RATIO_FIRST
    keys = tl.where(counted, keys, -1)
    high = tl.max(keys)
    if high >= 0:
        _add_keys(keys, tl.min(tl.where(counted, keys, _RATIO_BINS)), high, ratios)


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
def _total(mask):  # type: ignore[no-untyped-def]
    return tl.sum(mask.to(tl.int32)).to(tl.int64)


@triton.jit
def _compare(  # type: ignore[no-untyped-def]
    before,
    after,
    n,
    start,
    stop,
    stride,
    counts,
    extremes,
    facts,
    ratios,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count some blocks of an update: weights into one row, changes into the next, and its facts."""
    w_high, w_low = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
    d_high, d_low = tl.zeros((), tl.int32), tl.full((), _NONE, tl.int32)
    changed, in_fp16, in_bf16 = (
        tl.zeros((), tl.int64),
        tl.zeros((), tl.int64),
        tl.zeros((), tl.int64),
    )
    vanished, from_zero = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for at in range(start, stop, stride):
        old = _bits(before, at, n, KIND, BLOCK)
        new = _bits(after, at, n, KIND, BLOCK).to(tl.float32, bitcast=True)
        change = (new - old.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        weights, updates = old & _MAGNITUDE, change & _MAGNITUDE
        highest, lowest = _add_values(weights, counts)
        w_high, w_low = tl.maximum(w_high, highest), tl.minimum(w_low, lowest)
        highest, lowest = _add_values(updates, counts + _RAW)
        d_high, d_low = tl.maximum(d_high, highest), tl.minimum(d_low, lowest)
        _add_ratios(weights, updates, ratios)
        moved = updates > 0
        swallowed16, swallowed_b = _swallowed(old, change)
        changed += _total(moved)
        in_fp16 += _total(moved & swallowed16)
        in_bf16 += _total(moved & swallowed_b)
        vanished += _total(moved & (updates <= _VANISHING))
        from_zero += _total(moved & (weights == 0))
    _add_extremes(w_high, w_low, _NONE, extremes)
    _add_extremes(d_high, d_low, _NONE, extremes + 2)
    if changed > 0:
        _add(facts + _CHANGED, changed)
        _add(facts + _SWALLOWED_FP16, in_fp16)
        _add(facts + _SWALLOWED_BF16, in_bf16)
        _add(facts + _VANISHED_FP16, vanished)
        _add(facts + _RATIO_ZEROS, from_zero)


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
def one(address, n, counts, extremes, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count a tensor into its row."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    _count(address, n.to(tl.int64), start, n.to(tl.int64), stride, counts, extremes, KIND, BLOCK)


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table"])
def many(  # type: ignore[no-untyped-def]
    table, entries, counts, extremes, KIND: tl.constexpr, BLOCK: tl.constexpr, SECTION: tl.constexpr
):
    """Table: int64 (entries, 4), of size, address, row and first program."""
    entry, section = _entry(table, entries, 4, 3)
    n, address, row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    start = section * SECTION * BLOCK
    stop = tl.minimum(start + SECTION * BLOCK, n)
    counts += row * _RAW
    extremes += row * 2
    _count(address, n, start, stop, BLOCK, counts, extremes, KIND, BLOCK)


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table"])
def many_updates(  # type: ignore[no-untyped-def]
    table,
    entries,
    counts,
    extremes,
    facts,
    ratios,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTION: tl.constexpr,
):
    """Table: int64 (entries, 6), of size, two addresses, row, row of facts and first program."""
    entry, section = _entry(table, entries, 6, 5)
    n, before, after = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    row, fact = tl.load(entry + 3), tl.load(entry + 4)
    start = section * SECTION * BLOCK
    stop = tl.minimum(start + SECTION * BLOCK, n)
    counts += row * _RAW
    extremes += row * 2
    facts += fact * _UPDATE
    ratios += fact * _RATIO_BINS
    _compare(before, after, n, start, stop, BLOCK, counts, extremes, facts, ratios, KIND, BLOCK)


# -- launches --------------------------------------------------------------------------------------


_BLOCK = 4096
_UPDATE_BLOCK = 2048
_WARPS = 8
_SECTION = 8
"""Blocks of a program where many tensors are counted at once."""
_WIDE = layout.FLOAT64


def _count_values(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    kind, values = _readable(values)
    n = values.numel()
    programs = min(triton.cdiv(n, _BLOCK), _most_programs(values.device))
    with _on(values.device):
        one[(programs,)](
            values.data_ptr(), n, counts, extremes, KIND=kind, BLOCK=_BLOCK, **_limits(kind)
        )


def _count_many(
    values: Sequence[torch.Tensor],
    rows: Sequence[int],
    counts: torch.Tensor,
    extremes: torch.Tensor,
) -> None:
    entries: dict[int, list[list[int]]] = {}
    read = [_readable(v) for v in values]  # alive until all is launched
    for (kind, tensor), row in zip(read, rows, strict=True):
        entries.setdefault(kind, []).append([tensor.numel(), tensor.data_ptr(), row])
    for kind, some in entries.items():
        _launch(many, some, kind, _BLOCK, (counts, extremes), _limits(kind))


def _count_many_updates(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[tuple[int, int]],
    *into: torch.Tensor,
) -> None:
    entries: dict[int, list[list[int]]] = {}
    read = [_readable_update(*pair) for pair in pairs]
    for (kind, before, after), places in zip(read, rows, strict=True):
        entry = [before.numel(), before.data_ptr(), after.data_ptr(), *places]
        entries.setdefault(kind, []).append(entry)
    for kind, some in entries.items():
        _launch(many_updates, some, kind, _UPDATE_BLOCK, into, _limits(None))


def _launch(
    kernel: Any,
    entries: list[list[int]],
    kind: int,
    block: int,
    into: tuple[torch.Tensor, ...],
    limits: dict[str, int],
) -> None:
    """Launch a kernel for many tensors of a type.

    Torch keeps page-locked memory for further use, once the copy from it is done; so the copy of the
    table waits for nothing and no buffer is overwritten under way.

    Args:
        kernel: ``many`` or ``many_updates``.
        entries: What each tensor is, its size first, without its first program, which is added.
        kind: Their type.
        block: Values of a block.
        into: Where counts go.
        limits: Of the launch.
    """
    programs = 0
    for entry in entries:
        entry.append(programs)
        programs += triton.cdiv(entry[0], _SECTION * block)
    device = into[0].device
    table = torch.tensor(entries, dtype=torch.int64, pin_memory=device.type == "cuda")
    table = table.to(device, non_blocking=True)
    options = {"KIND": kind, "BLOCK": block, "SECTION": _SECTION, **limits}
    with _on(device):
        kernel[(programs,)](table, len(entries), *into, **options)


COUNTER = Counter("Triton", _count_values, _count_many, _count_many_updates)
"""Counts by these kernels; waits for nothing."""


@functools.cache
def _limits(kind: int | None) -> dict[str, int]:
    """Warps, and registers of a thread: chosen for sm_90 by ptxas, where float64 spills 16 bytes.

    With 80 an SM holds three programs, with 128 two, so that one reads while others count.

    Args:
        kind: The type of the values that are counted, None for an update.
    """
    if torch.version.hip is not None:
        return {"num_warps": _WARPS}
    wide = kind is None or kind == _WIDE
    return {"num_warps": _WARPS, "maxnreg": 128 if wide else 80}


def _readable(values: torch.Tensor) -> tuple[int, torch.Tensor]:
    kind = KINDS.get(values.dtype)
    return (layout.FLOAT32, values.float()) if kind is None else (kind, values)


def _readable_update(
    before: torch.Tensor, after: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    if before.dtype != after.dtype or KINDS.get(before.dtype, _WIDE) == _WIDE:
        before, after = before.float(), after.float()
    return KINDS[before.dtype], before, after


@functools.cache
def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return 8 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device if device.type == "cuda" else -1)
