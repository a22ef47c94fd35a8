"""Counting on the host, and which counter a device gets.

On the CPU raw rows are numpy arrays filled by Numba kernels; on an accelerator they are one device
tensor filled by Triton, or by plain torch operations, without waiting for the device until ``read``.
Counts are integers, so every way of splitting the work gives the same result.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable  # noqa: TC003 - NamedTuple reads it
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mpdiag.numerics.histograms import MIN_EXPONENT
from mpdiag.recording.counting import comparing, layout, numba_kernels, updating
from mpdiag.recording.counting.rows import RawRows, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

logger = logging.getLogger("mpdiag")


def rows_on(device: torch.device) -> Rows:
    """Raw rows for tensors on this device."""
    if device.type == "cpu":
        return HostRows()
    from mpdiag.recording.counting.device import DeviceRows

    return DeviceRows(device)


class Packed:
    """Rows of counts that are zero but for one stretch, which is kept alone.

    A tensor spans some 25 of FP32's 255 powers of two: a model of thousands of layers would
    otherwise hold, fault in and clear 8 KB for each of its tensors in each step.

    Args:
        body: Length of the part of a row of which one stretch is kept.
        tail: So many entries after it are kept whatever they are.
        joined: Whether a row that is taken has them, too.

    Attributes:
        table: What the kernels know of it, see ``numba_kernels.ROWS``.
        edges: float64 (room, 2), beside each row.
    """

    def __init__(self, body: int, tail: int, joined: bool = True) -> None:
        self._width = body + tail if joined else body
        self._body = body
        self._tail = tail
        self.table = np.zeros(8, np.int64)
        self._places: NDArray[np.int64]
        self._tails: NDArray[np.int64]
        self._cells: NDArray[np.int64]
        self.edges: NDArray[np.float64]
        self._make(64, 16 * body)

    def _make(self, rows: int, cells: int) -> None:
        """Make room, and take over what is there."""
        old = (self._places, self._tails, self.edges, self._cells) if self.rows else ()
        self._places = np.empty((rows, 3), np.int64)
        self._tails = np.empty((rows, self._tail), np.int64)
        self.edges = np.empty((rows, 2), np.float64)
        self._cells = np.empty(cells, np.int64)
        for mine, there in zip(
            (self._places, self._tails, self.edges, self._cells), old, strict=False
        ):
            mine[: len(there)] = there
        arrays = self._places, self._cells, self._tails, self.edges
        self.table[: len(arrays)] = [array.ctypes.data for array in arrays]
        self.table[numba_kernels.ROOM], self.table[numba_kernels.CELL_ROOM] = rows, cells

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.table[numba_kernels.ROWS])

    def room(self, more: int = 1) -> tuple[NDArray[np.int64], ...]:
        """Arrays with room for at least one more row, as ``numba_kernels.keep`` takes them."""
        rows, cells, used = len(self._places), len(self._cells), self.table[numba_kernels.USED]
        few, full = self.rows + more > rows, used + more * self._body > cells
        if few or full:
            self._make(rows * 2 if few else rows, cells * 2 if full else cells)
        return self._places, self._cells, self._tails

    def append(self, row: NDArray[np.int64]) -> int:
        """Keep a row of scratch memory, int64 (body + tail or more,), and leave zeros there."""
        number = self.rows
        used = numba_kernels.keep(row, self._body, number, *self.room())
        self.table[numba_kernels.ROWS : numba_kernels.USED + 1] = number + 1, used
        return number

    def __getitem__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Some rows as they were, int64 (n, width)."""
        chosen = np.asarray(indices, np.int64)
        rows = np.zeros((len(chosen), self._width), np.int64)
        numba_kernels.unpack(chosen, self._body, self._places, self._cells, self._tails, rows)
        return rows

    def binned(
        self, indices: NDArray[np.int64]
    ) -> tuple[int, NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Some rows of quarters as bins; see ``rows.BinnedTable``."""
        places = self._places[indices]
        some = places[places[:, 2] > places[:, 1]]
        first = int(some[:, 1].min()) >> 2 if len(some) else 0
        stop = (int(some[:, 2].max()) + 3) >> 2 if len(some) else 1
        shape = len(indices), stop - first
        counts, sums = np.zeros(shape, np.int64), np.zeros(shape, np.float64)
        numba_kernels.bin_quarters(places, self._cells, first, counts, sums)
        sums *= np.exp2(np.arange(first, stop, dtype=np.float64) + MIN_EXPONENT)
        return first, counts, sums, self._tails[indices]

    def clear(self) -> None:
        """Forget all rows, and give back memory that only a very large step needs."""
        self.table[numba_kernels.ROWS : numba_kernels.USED + 1] = 0
        if self._cells.nbytes > _KEPT_BYTES:
            self._make(64, 16 * self._body)

    def tails(self) -> NDArray[np.int64]:
        """The ends of all rows, int64 (rows, tail)."""
        return self._tails[: self.rows]


_KEPT_BYTES = 1 << 23
"""Rows keep this much memory for the next ones."""
_SHARED = 1 << 21
"""Tensors of this many values and more are counted by several threads."""
_PORTION = 1 << 19
_KINDS = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
    torch.float64: layout.FLOAT64,
}
_LINE = 64
_SIZES = {layout.FLOAT32: 4, layout.BFLOAT16: 2, layout.FLOAT16: 2, layout.FLOAT64: 8}


class Scratch:
    """Memory that a kernel counts in, and leaves as it was."""

    def __init__(self) -> None:
        self.row = np.zeros(numba_kernels.SCRATCH, np.int64)
        self.edges = np.array([0.0, math.inf])
        self.work = _aligned(comparing.COMPARING_WORK)
        places = [array.ctypes.data for array in (self.row, self.edges, self.work)]
        self.table = np.array([*places, self.work.size])


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeros that begin where a line of the cache does: a vector across two lines takes two accesses."""
    memory = np.zeros(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size]


class Kernels(NamedTuple):
    """Compiled functions that count; see ``numba_kernels`` and ``updating``."""

    count_values: Callable[..., None]
    count_row: Callable[..., int]
    count_rows: Callable[..., int]
    count_update: Callable[..., None]
    count_updates: Callable[..., int]


PLAIN = Kernels(
    numba_kernels.count_values,
    numba_kernels.count_row,
    numba_kernels.count_rows,
    updating.count_update_in_tables,
    updating.count_updates_in_tables,
)
COMPARING = Kernels(
    comparing.count_values,
    comparing.count_row,
    comparing.count_rows,
    updating.count_update,
    updating.count_updates,
)


@cache
def kernels() -> Kernels:
    """The kernels that count here: ``COMPARING``, or where LLVM refuses these, ``PLAIN``."""
    trial, scratch = np.zeros(comparing.FEW, np.float32), Scratch()
    address, memory = trial.ctypes.data, (scratch.row, scratch.edges, scratch.work)
    try:
        COMPARING.count_values(address, trial.size, layout.FLOAT32, *memory)
    except Exception as error:  # noqa: BLE001 - whatever a compiler may say
        logger.info("counting with plain kernels, which are slower: %s", error)
        return PLAIN
    return COMPARING


def prepare() -> None:
    """Load the kernels now; the first time after an installation Numba compiles them, for some 20 s."""
    rows, values = HostRows(), torch.ones(comparing.FEW)
    rows.count(values)
    rows.count_update(values, values)
    rows.read().counts[[0]]


class HostRows:
    """Raw rows in memory, filled by the Numba kernels; one thread at a time."""

    def __init__(self) -> None:
        self._counts = Packed(layout.QUARTERS, layout.RAW - layout.QUARTERS)
        self._ratios = Packed(layout.RATIO_BINS, layout.UPDATE, joined=False)
        self._make_scratch()

    def _make_scratch(self) -> None:
        self._scratch, self._updates = Scratch(), Scratch()
        self._facts = np.zeros(numba_kernels.UPDATE_ROW, np.int64)

    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """See ``Rows``. Others than the types of ``layout`` are read as float32."""
        kind = _KINDS.get(values.dtype)
        if kind is None:
            kind, values = layout.FLOAT32, values.float()
        n = values.numel()
        count_with, rows, scratch = kernels(), self._counts.table, self._scratch
        if n >= _SHARED:
            scratch = Scratch()  # an interruption leaves nothing in the other
            _count_shared(count_with.count_values, values, kind, scratch)
            n = 0
        address = values.data_ptr()
        row = count_with.count_row(address, n, kind, repeat, zeros, scratch.table, rows)
        if row < 0:
            self._counts.room()
            row = count_with.count_row(address, n, kind, repeat, zeros, scratch.table, rows)
        return row

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """See ``Rows``: in one call of the kernel, but for tensors that several threads count."""
        few = all(v.dtype in _KINDS and v.numel() < _SHARED for v, _, _ in tensors)
        if not few or not tensors:
            return [self.count(*tensor) for tensor in tensors]
        items = np.array(
            [
                (v.data_ptr(), v.numel(), _KINDS[v.dtype], repeat, zeros)
                for v, repeat, zeros in tensors
            ],
            np.int64,
        )
        first, done = self._counts.rows, 0
        while done < len(items):
            self._counts.room()
            done += kernels().count_rows(items[done:], self._scratch.table, self._counts.table)
        return list(range(first, first + done))

    def count_update(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int]:
        """See ``Rows``. Both are flat, dense, of equal length and layout."""
        return self.count_many_updates([(before.float(), after.float())])[0]

    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """See ``Rows``: in one call of the kernel, but for types that have to be converted."""
        if any(tensor.dtype != torch.float32 for pair in pairs for tensor in pair):
            return [self.count_update(*pair) for pair in pairs]  # no two copies at a time
        items = np.array(
            [(before.data_ptr(), after.data_ptr(), before.numel()) for before, after in pairs],
            np.int64,
        )
        return self._count_updates(items)

    def _count_updates(self, items: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        counts, ratios = self._counts, self._ratios
        row, fact, done = counts.rows, ratios.rows, 0
        scratch = self._scratch.table, self._updates.table, self._facts
        try:
            while done < len(items):
                counts.room(2)
                ratios.room()
                done += kernels().count_updates(items[done:], *scratch, counts.table, ratios.table)
        except BaseException:
            self._make_scratch()
            raise
        return [(row + 2 * i, row + 2 * i + 1, fact + i) for i in range(done)]

    def read(self) -> RawRows:
        """All rows counted since the last ``clear``; see ``Rows``."""
        return RawRows(
            counts=self._counts,
            extremes=self._counts.edges[: self._counts.rows],
            facts=self._ratios.tails(),
            ratios=self._ratios,
        )

    def clear(self) -> None:
        """Forget all rows; see ``Rows``."""
        self._counts.clear()
        self._ratios.clear()


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has the pool's object but none of its threads."""
    global _pool  # noqa: PLW0603
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _count_shared(
    kernel: Callable[..., None], values: torch.Tensor, kind: int, result: Scratch
) -> None:
    """Count with the help of other threads, each taking the next portion until none is left.

    Torch's own threads spin for a while after an operation and hold the processors; helpers that
    get none in time are simply not waited for.
    """
    global _pool  # noqa: PLW0603
    helpers = min(torch.get_num_threads(), 8) - 1
    if helpers > 0 and _pool is None:
        _pool = ThreadPoolExecutor(7, thread_name_prefix="mpdiag-count")
    portions = itertools.count()
    address, n = values.data_ptr(), values.numel()
    last = -(-n // _PORTION)

    def work() -> Scratch:
        mine = Scratch()
        while (i := next(portions)) < last:
            start = i * _PORTION
            place, size = address + start * values.element_size(), min(_PORTION, n - start)
            kernel(place, size, kind, mine.row, mine.edges, mine.work)
        return mine

    futures = [_pool.submit(work) for _ in range(helpers)] if _pool is not None else []
    parts = [work()]
    parts += [future.result() for future in futures if not future.cancel()]
    for part in parts:
        result.row += part.row
        result.edges[0] = max(result.edges[0], part.edges[0])
        result.edges[1] = min(result.edges[1], part.edges[1])
