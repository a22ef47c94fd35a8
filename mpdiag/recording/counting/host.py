"""Counting on the host, and which counter a device gets.

On the CPU raw rows are numpy arrays filled by Numba kernels; on an accelerator they are one device
tensor filled by Triton, or by plain torch operations, without waiting for the device until ``read``.
Counts are integers, so every way of splitting the work gives the same result.
"""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpdiag.numerics.histograms import MIN_EXPONENT
from mpdiag.recording.counting import layout, numba_kernels
from mpdiag.recording.counting.rows import RawRows, Rows
from mpdiag.recording.counting.tensors import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


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

    def make_room(self, more: int = 1) -> None:
        """Make room for at least so many more rows."""
        rows, cells, used = len(self._places), len(self._cells), self.table[numba_kernels.USED]
        few, full = self.rows + more > rows, used + more * self._body > cells
        if few or full:
            self._make(rows * 2 if few else rows, cells * 2 if full else cells)

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


def _scratch() -> NDArray[np.int64]:
    """Memory that a kernel counts in, and leaves as it was."""
    scratch = np.zeros(numba_kernels.SCRATCH, np.int64)
    _edges(scratch)[1] = math.inf
    return scratch


def _edges(scratch: NDArray[np.int64]) -> NDArray[np.float64]:
    """The extremes in scratch memory, float64 (2,)."""
    return scratch[numba_kernels.EDGES_AT : numba_kernels.BLOCK_AT].view(np.float64)


def prepare() -> None:
    """Load the kernels now; the first time after an installation Numba compiles them, for some 10 s."""
    rows, values = HostRows(), torch.ones(1)
    rows.count(values)
    rows.count_many([(values, 1, 0)])
    rows.count_many_updates([(values, values)])
    rows.read().counts[[0]]


class HostRows:
    """Raw rows in memory, filled by the Numba kernels; one thread at a time."""

    def __init__(self) -> None:
        self._counts = Packed(layout.QUARTERS, layout.RAW - layout.QUARTERS)
        self._ratios = Packed(layout.RATIO_BINS, layout.UPDATE, joined=False)
        self._scratch, self._updates = _scratch(), _scratch()
        self._facts = np.zeros(numba_kernels.UPDATE_ROW, np.int64)

    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """See ``Rows``. Others than the types of ``layout`` are read as float32."""
        kind = KINDS.get(values.dtype)
        if kind is None:
            kind, values = layout.FLOAT32, values.float()
        address, n, scratch = values.data_ptr(), values.numel(), self._scratch
        if n >= _SHARED:
            scratch, n = _count_shared(values, kind), 0
        self._counts.make_room()
        what = address, n, kind, repeat, zeros
        row: int = numba_kernels.count_row(*what, scratch, self._counts.table)
        return row

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """See ``Rows``: in one call of the kernel, but for tensors that several threads count."""
        few = all(v.dtype in KINDS and v.numel() < _SHARED for v, _, _ in tensors)
        if not few or not tensors:
            return [self.count(*tensor) for tensor in tensors]
        items = np.array(
            [
                (v.data_ptr(), v.numel(), KINDS[v.dtype], repeat, zeros)
                for v, repeat, zeros in tensors
            ],
            np.int64,
        )
        counts = self._counts
        first, done = counts.rows, 0
        while done < len(items):
            counts.make_room()
            done += numba_kernels.count_rows(items[done:], self._scratch, counts.table)
        return list(range(first, first + done))

    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """See ``Rows``: in one call of the kernel, but for types that have to be converted."""
        if any(tensor.dtype != torch.float32 for pair in pairs for tensor in pair):
            # One after another, so that no two pairs of copies are in memory.
            return [self._count_updates([(w.float(), new.float())])[0] for w, new in pairs]
        return self._count_updates(pairs)

    def _count_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        counts, ratios = self._counts, self._ratios
        items = [(before.data_ptr(), after.data_ptr(), before.numel()) for before, after in pairs]
        places = np.array(items, np.int64).reshape(-1, 3)
        row, fact, done = counts.rows, ratios.rows, 0
        scratch = self._scratch, self._updates, self._facts
        while done < len(places):
            counts.make_room(2)
            ratios.make_room()
            done += numba_kernels.count_updates(places[done:], *scratch, counts.table, ratios.table)
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


def _count_shared(values: torch.Tensor, kind: int) -> NDArray[np.int64]:
    """Count with the help of other threads, each taking the next portion until none is left.

    Torch's own threads spin for a while after an operation and hold the processors; helpers that
    get none in time are simply not waited for.

    Returns:
        Scratch memory of its own, in which they are counted: an interruption leaves nothing elsewhere.
    """
    global _pool  # noqa: PLW0603
    helpers = min(torch.get_num_threads(), 8) - 1
    if helpers > 0 and _pool is None:
        _pool = ThreadPoolExecutor(7, thread_name_prefix="mpdiag-count")
    portions = itertools.count()
    address, n = values.data_ptr(), values.numel()
    last = -(-n // _PORTION)

    def work() -> NDArray[np.int64]:
        mine = _scratch()
        while (i := next(portions)) < last:
            start = i * _PORTION
            place, size = address + start * values.element_size(), min(_PORTION, n - start)
            numba_kernels.count_values(place, size, kind, mine)
        return mine

    futures = [_pool.submit(work) for _ in range(helpers)] if _pool is not None else []
    result = work()
    for future in futures:
        if not future.cancel():
            part = future.result()
            result[: layout.RAW] += part[: layout.RAW]
            highest, lowest = _edges(part)
            _edges(result)[:] = max(_edges(result)[0], highest), min(_edges(result)[1], lowest)
    return result
