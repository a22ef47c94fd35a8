"""A buffer on disk, so that reading a large trace takes no more memory than a small one."""

from __future__ import annotations

import math
import struct
import tempfile
from bisect import bisect_left
from operator import itemgetter
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTION = 8192
"""Records per portion; portions are written and read as a whole."""
_OPEN = -1
_first = itemgetter(0)


class DiskBuffer:
    """Packed records in portions, which can be looked up by the range of a key.

    Only full portions go to disk, so a short trace never touches it.

    Args:
        form: The format of a record, for ``struct``.
    """

    def __init__(self, form: str) -> None:
        self._form = struct.Struct(form)
        self._pack, self._full = self._form.pack, PORTION * self._form.size
        self._file: IO[bytes] | None = None
        self._portions: list[tuple[float, float, int]] = []
        self._open = bytearray()
        self._low, self._high = math.inf, -math.inf

    def add(self, low: float, high: float, *fields: Any) -> None:
        """Append a record whose key spans [low, high]."""
        self._open += self._pack(*fields)
        if low < self._low:
            self._low = low
        if high > self._high:
            self._high = high
        if len(self._open) >= self._full:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mpdiag-")  # noqa: SIM115 - closed by close
        offset = self._file.seek(0, 2)
        self._file.write(self._open)
        self._portions.append((self._low, self._high, offset))
        self._open = bytearray()
        self._low, self._high = math.inf, -math.inf

    def portions(self) -> Iterator[list[tuple[Any, ...]]]:
        """All portions, in the order they were added."""
        for _, _, offset in self._portions:
            yield list(self._form.iter_unpack(self._read(offset)))
        if self._open:
            yield list(self._form.iter_unpack(bytes(self._open)))

    def overlapping(self, low: float, high: float) -> Iterator[tuple[Any, ...]]:
        """The records of all portions that overlap [low, high]; some records lie outside it."""
        for begin, end, offset in self._portions:
            if begin <= high and end >= low:
                yield from self._form.iter_unpack(self._read(offset))
        if self._open and self._low <= high and self._high >= low:
            yield from self._form.iter_unpack(bytes(self._open))

    def in_order(self) -> Iterator[tuple[Any, ...]]:
        """All records by their first field, which must be the low end of their key.

        Only portions that overlap are in memory together: few, where records came almost in order.
        """
        portions = sorted(self._portions)
        if self._open:
            portions = sorted([*portions, (self._low, self._high, _OPEN)])
        waiting: list[tuple[Any, ...]] = []
        for low, _, offset in portions:
            at = bisect_left(waiting, low, key=_first)
            yield from waiting[:at]
            packed = bytes(self._open) if offset == _OPEN else self._read(offset)
            waiting = sorted([*waiting[at:], *self._form.iter_unpack(packed)], key=_first)
        yield from waiting

    def _read(self, offset: int) -> bytes:
        assert self._file is not None
        self._file.seek(offset)
        return self._file.read(self._full)

    def close(self) -> None:
        """Drop every record and the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._portions.clear()
        self._open.clear()
