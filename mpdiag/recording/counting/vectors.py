"""Vector code for the counting kernels, which Numba's own loops cannot express.

Numba widens bytes to 64 bits before it calculates, so a loop over bytes does not vectorise. The
functions here build LLVM's vectors themselves; LLVM lowers them to what the processor has (AVX2,
AVX-512, NEON). Lanes are chosen for 16 registers of 32 bytes; wider registers run the same code.

A value's *top* is the upper half of ``(bits << 1) - 1``: eight bits of exponent, then the mantissa.
Its upper ten bits are the quarter of a power of two that ``layout`` counts, and a zero wraps to
0xFFFF. Counting is a comparison with each quarter in turn, done for 256 values at once: *planes* hold
bit i of 256 quarters each, a mask is an AND of planes, and its ones are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils as _cgutils
from numba.core import types

if TYPE_CHECKING:
    from collections.abc import Sequence

intrinsic: Any = extending.intrinsic  # numba's own types know no arguments of what it makes
cgutils: Any = _cgutils

LANES = 16
"""Values of 32 bits that one vector holds."""
SCANNED = 2 * LANES
"""``scan`` reads multiples of so many values."""
GROUP = 256
"""Values of a set of planes."""
PLANES = 7
"""Planes of a group: five bits of octaves below the highest, two of quarters."""
OCTAVES = 30
"""Octaves that one set of planes tells apart; a value further down looks like a zero."""

_BYTES = 32  # of a plane
_LINE = 64  # bytes that a cache fetches together
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def _vector(lane: ir.IntType, lanes: int) -> ir.VectorType:
    return ir.VectorType(lane, lanes)


def _splat(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)


def _broadcast(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of ``lanes`` times a scalar that is known when the code runs."""
    kind = _vector(value.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, _splat(_vector(_I32, lanes), 0))


def _memory(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """The address of an array's first value, as a byte pointer."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(data, _I8.as_pointer())


def _place(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A pointer to ``kind``, ``offset`` bytes (a number or a value) from ``base``."""
    if isinstance(offset, int):
        offset = ir.Constant(_I64, offset)
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    value = builder.load(_place(builder, base, offset, kind))
    value.align = 1
    return value


def _store(builder: Any, value: Any, base: Any, offset: Any) -> None:
    builder.store(value, _place(builder, base, offset, value.type)).align = 1


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(value.type, factor))


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of all lanes, as int64."""
    return builder.zext(_reduced(builder, "add", vector), _I64)


def _reduced(builder: Any, operation: str, vector: Any) -> Any:
    kind = vector.type
    name = f"llvm.vector.reduce.{operation}.v{kind.count}i{kind.element.width}"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind.element, [kind]), name
    )
    return builder.call(function, [vector])


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", a, b), a, b)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _shuffled(builder: Any, a: Any, b: Any, order: Sequence[int]) -> Any:
    indices = ir.Constant(_vector(_I32, len(order)), [ir.Constant(_I32, i) for i in order])
    return builder.shuffle_vector(a, b, indices)


@intrinsic
def pointer(_typing: Any, address: Any) -> tuple[Any, Any]:
    """An address as a pointer, from which ``numba.carray`` makes an array."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.voidptr(address), generate


@intrinsic
def as_bits(_typing: Any, value: Any) -> tuple[Any, Any]:
    """The bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(value), generate


@intrinsic
def as_float(_typing: Any, bits: Any) -> tuple[Any, Any]:
    """The float32 of a bit pattern."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(bits), generate


def _fetch(builder: Any, address: Any, index: Any, lines: int) -> None:
    """Fetch ``lines`` lines into cache, those of number ``index * lines`` and up from an address.

    Memory that is not there does no harm. A core waits for some ten lines at a time, so fetching is
    spread over all that is done with a block; at once it would hold up what comes after it.
    """
    kind = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # to read, into all levels, data
    first = builder.gep(address, [_times(builder, index, lines * _LINE)])
    for line in range(lines):
        builder.call(function, [builder.gep(first, [ir.Constant(_I64, line * _LINE)]), *how])


@intrinsic
def fetch(_typing: Any, address: Any) -> tuple[Any, Any]:
    """Fetch the line of an address into cache."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I8.as_pointer())
        _fetch(builder, place, ir.Constant(_I64, 0), 1)
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def scan(
    _typing: Any, source: Any, count: Any, tops: Any, limits: Any, ahead: Any
) -> tuple[Any, Any]:
    """Write the tops of float32 values, in any order; returns how many are 0xFFFF.

    Args:
        source: Address of the values.
        count: How many, a multiple of ``SCANNED``.
        tops: uint16 (count or more,), written.
        limits: uint32 (2,), written: the smallest ``(bits << 1) - 1``, and the largest ``bits << 1``.
        ahead: An address from which memory is fetched into cache meanwhile, 2 bytes for each value.
    """
    words, halves = _vector(_I32, LANES), _vector(_I16, SCANNED)
    # The upper halves of two vectors, taken so that no half leaves its place: which value comes
    # first does not matter.
    upper = [i + 1 - i % 2 if i % 2 == 0 else i + SCANNED for i in range(SCANNED)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, next_values = (builder.inttoptr(args[i], _I8.as_pointer()) for i in (0, 4))
        out = _memory(context, builder, signature.args[2], args[2])
        edges = _memory(context, builder, signature.args[3], args[3])
        low = cgutils.alloca_once_value(builder, _splat(words, 0xFFFFFFFF))
        high = cgutils.alloca_once_value(builder, _splat(words, 0))
        zeros = cgutils.alloca_once_value(builder, _splat(halves, 0))
        rounds = builder.udiv(args[1], ir.Constant(args[1].type, SCANNED))
        with cgutils.for_range(builder, rounds) as loop:
            base = builder.gep(values, [_times(builder, loop.index, 4 * SCANNED)])
            _fetch(builder, next_values, loop.index, 1)
            pair = []
            for part in range(2):
                bits = _load(builder, base, 4 * LANES * part, words)
                doubled = builder.shl(bits, _splat(words, 1))
                moved = builder.sub(doubled, _splat(words, 1))
                builder.store(_smaller(builder, moved, builder.load(low)), low)
                builder.store(_larger(builder, doubled, builder.load(high)), high)
                pair.append(builder.bitcast(moved, halves))
            top = _shuffled(builder, pair[0], pair[1], upper)
            wrapped = builder.icmp_unsigned("==", top, _splat(halves, 0xFFFF))
            builder.store(builder.sub(builder.load(zeros), builder.sext(wrapped, halves)), zeros)
            _store(builder, top, out, _times(builder, loop.index, 2 * SCANNED))
        _store(builder, _reduced(builder, "umin", builder.load(low)), edges, 0)
        _store(builder, _reduced(builder, "umax", builder.load(high)), edges, 4)
        return _sum(builder, builder.load(zeros))

    return types.int64(source, count, tops, limits, ahead), generate


@intrinsic
def count_beyond(_typing: Any, source: Any, count: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Count float32 values that are large, and those that are small but not 0.

    Returns |x| of at least ``high`` in the lower 32 bits, |x| of at most ``low`` in the upper ones.

    Args:
        source: Address of the values.
        count: How many, a multiple of ``SCANNED``.
        high: Bit pattern of a magnitude.
        low: Bit pattern of a smaller one.
    """
    words = _vector(_I32, LANES)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values = builder.inttoptr(args[0], _I8.as_pointer())
        upper, lower = (_broadcast(builder, builder.trunc(a, _I32), LANES) for a in args[2:])
        above = cgutils.alloca_once_value(builder, _splat(words, 0))
        under = cgutils.alloca_once_value(builder, _splat(words, 0))
        rounds = builder.udiv(args[1], ir.Constant(args[1].type, LANES))
        with cgutils.for_range(builder, rounds) as loop:
            bits = _load(builder, values, _times(builder, loop.index, 4 * LANES), words)
            size = builder.and_(bits, _splat(words, 0x7FFFFFFF))
            less = builder.sub(size, _splat(words, 1))  # 0 becomes the largest
            for total, found in (
                (above, builder.icmp_unsigned(">=", size, upper)),
                (under, builder.icmp_unsigned("<", less, lower)),
            ):
                ones = builder.sext(found, words)
                builder.store(builder.sub(builder.load(total), ones), total)
        counted = [_sum(builder, builder.load(total)) for total in (above, under)]
        return builder.or_(counted[0], builder.shl(counted[1], ir.Constant(_I64, 32)))

    return types.int64(source, count, high, low), generate


def _swapped(builder: Any, a: Any, b: Any, shift: int, mask: int) -> tuple[Any, Any]:
    """Exchange the bits ``mask << shift`` of a with the bits ``mask`` of b."""
    kind = a.type
    by = _splat(kind, shift)
    moved = builder.and_(builder.xor(builder.lshr(a, by), b), _splat(kind, mask))
    return builder.xor(a, builder.shl(moved, by)), builder.xor(b, moved)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors whose byte j has bit i of byte j of each given one, i = 0 … 7."""
    for shift, mask in ((4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        for i in range(8):
            if i & shift == 0:
                rows[i], rows[i + shift] = _swapped(builder, rows[i], rows[i + shift], shift, mask)
    return rows


@intrinsic
def slice_bits(
    _typing: Any, tops: Any, groups: Any, highest: Any, planes: Any, ahead: Any
) -> tuple[Any, Any]:
    """Turn tops into planes: how many quarters each value lies below the highest, bit by bit.

    Args:
        tops: uint16 (GROUP * groups,).
        groups: How many groups of values.
        highest: The highest quarter that is wanted. Values above it, and those ``OCTAVES`` octaves
            or more below, look like none.
        planes: uint8 (groups * PLANES * 32,), written.
        ahead: An address from which memory is fetched into cache meanwhile, 256 bytes for each group.
    """
    kind = _vector(_I16, _BYTES // 2)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _memory(context, builder, signature.args[0], args[0])
        out = _memory(context, builder, signature.args[3], args[3])
        top = _broadcast(builder, builder.trunc(args[2], _I16), kind.count)
        next_values = builder.inttoptr(args[4], _I8.as_pointer())

        def below(base: Any, offset: int) -> Any:
            quarter = builder.lshr(_load(builder, base, offset, kind), _splat(kind, 6))
            return _smaller(builder, builder.sub(top, quarter), _splat(kind, 127))

        with cgutils.for_range(builder, args[1]) as loop:
            base = builder.gep(source, [_times(builder, loop.index, 2 * GROUP)])
            _fetch(builder, next_values, loop.index, 4)
            rows = []
            for row in range(8):
                first, second = (below(base, _BYTES * (2 * row + half)) for half in range(2))
                rows.append(builder.or_(first, builder.shl(second, _splat(kind, 8))))
            start = builder.gep(out, [_times(builder, loop.index, PLANES * _BYTES)])
            for i, plane in enumerate(_transposed(builder, rows)[:PLANES]):
                _store(builder, plane, start, _BYTES * i)
        return context.get_dummy_value()

    return types.void(tops, groups, highest, planes, ahead), generate


@intrinsic
def count_pair(
    _typing: Any, planes: Any, groups: Any, pair: Any, found: Any, ahead: Any
) -> tuple[Any, Any]:
    """Count the values in each quarter of two neighbouring octaves.

    Args:
        planes: uint8, as ``slice_bits`` wrote them.
        groups: How many groups, at most 31 (a byte counts them).
        pair: The octaves ``2 * pair`` and ``2 * pair + 1`` below the highest.
        found: int64 (8,), written; the highest quarter first.
        ahead: An address from which memory is fetched into cache meanwhile, 64 bytes for each group.
    """
    whole, ones = _vector(_I64, _BYTES // 8), _vector(_I8, _BYTES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _memory(context, builder, signature.args[0], args[0])
        out = _memory(context, builder, signature.args[3], args[3])
        next_values = builder.inttoptr(args[4], _I8.as_pointer())
        flips = []  # all ones where a bit of ``pair`` is 0
        for bit in range(4):
            shifted = builder.lshr(args[2], ir.Constant(args[2].type, bit))
            flip = builder.sub(builder.and_(shifted, ir.Constant(_I64, 1)), ir.Constant(_I64, 1))
            flips.append(_broadcast(builder, flip, whole.count))
        sums = [cgutils.alloca_once_value(builder, _splat(ones, 0)) for _ in range(8)]
        ones_in = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ones, [ones]), f"llvm.ctpop.v{_BYTES}i8"
        )
        with cgutils.for_range(builder, args[1]) as loop:
            base = builder.gep(source, [_times(builder, loop.index, PLANES * _BYTES)])
            _fetch(builder, next_values, loop.index, 1)
            rows = [_load(builder, base, _BYTES * i, whole) for i in range(PLANES)]
            masks = [builder.xor(rows[3], flips[0])]
            for row, flip in zip(rows[4:], flips[1:], strict=True):
                masks[0] = builder.and_(masks[0], builder.xor(row, flip))
            for row in (rows[2], rows[1], rows[0]):
                masks = [
                    half
                    for mask in masks
                    for half in (builder.and_(mask, builder.not_(row)), builder.and_(mask, row))
                ]
            for mask, total in zip(masks, sums, strict=True):
                counted = builder.call(ones_in, [builder.bitcast(mask, ones)])
                builder.store(builder.add(builder.load(total), counted), total)
        for i, total in enumerate(sums):
            wide = builder.zext(builder.load(total), _vector(_I16, _BYTES))
            _store(builder, _sum(builder, wide), out, 8 * i)
        return context.get_dummy_value()

    return types.void(planes, groups, pair, found, ahead), generate


@intrinsic
def below(_typing: Any, tops: Any, word: Any, limit: Any) -> tuple[Any, Any]:
    """A mask of those of 64 tops that are less than a limit: bit i speaks of ``tops[64 * word + i]``."""
    kind = _vector(_I16, 64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _memory(context, builder, signature.args[0], args[0])
        values = _load(builder, source, _times(builder, args[1], 128), kind)
        limits = _broadcast(builder, builder.trunc(args[2], _I16), kind.count)
        return builder.bitcast(builder.icmp_unsigned("<", values, limits), _I64)

    return types.uint64(tops, word, limit), generate


@intrinsic
def lowest_bit(_typing: Any, mask: Any) -> tuple[Any, Any]:
    """The number of the lowest bit of a mask that is set, of 0 that of the first."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I1])
        function = builder.module.declare_intrinsic("llvm.cttz", [_I64], kind)
        found = builder.call(function, [args[0], ir.Constant(_I1, 0)])
        return builder.and_(found, ir.Constant(_I64, 63))

    return types.uint64(mask), generate


@intrinsic
def ones_in(_typing: Any, mask: Any) -> tuple[Any, Any]:
    """How many bits of a mask are set."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(mask), generate
