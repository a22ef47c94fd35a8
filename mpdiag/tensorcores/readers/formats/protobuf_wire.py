"""The wire format of Protocol Buffers: fields of a message, without the message's description.

The format is four kinds of field (https://protobuf.dev/programming-guides/encoding/). The library needs
the whole file in memory and refuses one that was cut off; this reads what is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
_MORE = 0x80
"""The bit of a byte that says that another one follows."""


class CutOff(ValueError):
    """The message ends within a field, or is no message."""


def fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message between two positions.

    Yields:
        Number, kind, and two integers: of a varint or fixed number its value and 0, of bytes the
        positions of their beginning and end.

    Raises:
        CutOff: After the last whole field.
    """
    at = start
    while at < end:
        tag, at = varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise CutOff
        if kind == VARINT:
            value, at = varint(data, at, end)
            yield number, kind, value, 0
        elif kind == BYTES:
            length, at = varint(data, at, end)
            if at + length > end:
                raise CutOff
            yield number, kind, at, at + length
            at += length
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            if at + size > end:
                raise CutOff
            yield number, kind, int.from_bytes(data[at : at + size], "little"), 0
            at += size
        else:
            raise CutOff


def varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """An integer of variable length, and the position behind it."""
    value = shift = 0
    for i in range(at, min(end, at + _LONGEST_VARINT)):
        byte = data[i]
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, i + 1
        shift += 7
    raise CutOff
