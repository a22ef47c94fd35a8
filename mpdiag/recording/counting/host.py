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
        rows: How many rows there are.
        edges: float64 (room, 2), beside each row.
    """

    def __init__(self, body: int, tail: int, joined: bool = True) -> None:
        self._width = body + tail if joined else body
        self._body = body
        self._tail = tail
        self.rows = 0
        self._used = 0  # cells
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

    def room(self) -> tuple[NDArray[np.int64], ...]:
        """Arrays with room for one more row, as ``numba_kernels.keep`` takes them."""
        rows, cells = len(self._places), len(self._cells)
        if self.rows >= rows or self._used + self._body > cells:  # or both
            rows *= 2 if self.rows >= rows else 1
            cells *= 2 if self._used + self._body > cells else 1
            self._make(rows, cells)
        return self._places, self._cells, self._tails

    def added(self, used: int) -> int:
        """Note that a row was written, after which so many cells are used; returns its number."""
        self._used = used
        self.rows += 1
        return self.rows - 1

    def append(self, row: NDArray[np.int64]) -> int:
        """Keep a row of scratch memory, int64 (body + tail or more,), and leave zeros there."""
        return self.added(numba_kernels.keep(row, self._body, self.rows, *self.room()))

    def __getitem__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Some rows as they were, int64 (n, width)."""
        chosen = np.asarray(indices, np.int64)
        rows = np.zeros((len(chosen), self._width), np.int64)
        numba_kernels.unpack(chosen, self._body, self._places, self._cells, self._tails, rows)
        return rows

    def binned(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Some rows of quarters as bins; see ``rows.BinnedTable``."""
        shape = len(indices), self._body // 4
        counts, sums = np.zeros(shape, np.int64), np.zeros(shape, np.float64)
        numba_kernels.bin_quarters(indices, self._places, self._cells, counts, sums)
        return counts, sums, self._tails[indices]

    def clear(self) -> None:
        """Forget all rows, and give back memory that only a very large step needs."""
        self.rows = self._used = 0
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
_SIZES = {layout.FLOAT32: 4, layout.BFLOAT16: 2, layout.FLOAT16: 2, layout.FLOAT64: 8}


class Scratch:
    """Memory that a kernel counts in, and leaves as it was."""

    def __init__(self) -> None:
        self.row = np.zeros(numba_kernels.SCRATCH, np.int64)
        self.edges = np.array([0.0, math.inf])
        self.work = np.zeros(comparing.COMPARING_WORK, np.uint8)


class Kernels(NamedTuple):
    """Compiled functions that count; see ``numba_kernels`` and ``updating``."""

    count_values: Callable[..., None]
    count_row: Callable[..., int]
    count_update: Callable[..., None]


PLAIN = Kernels(
    numba_kernels.count_values, numba_kernels.count_row, updating.count_update_in_tables
)
COMPARING = Kernels(comparing.count_values, comparing.count_row, updating.count_update)


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
        count_with, rows, scratch = kernels(), self._counts, self._scratch
        if n >= _SHARED:
            scratch = Scratch()  # an interruption leaves nothing in the other
            _count_shared(count_with.count_values, values, kind, scratch)
            n = 0
        used = count_with.count_row(
            values.data_ptr(),
            n,
            kind,
            repeat,
            zeros,
            rows.rows,
            scratch.row,
            scratch.edges,
            scratch.work,
            *rows.room(),
            rows.edges,
        )
        return rows.added(used)

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """See ``Rows``."""
        return [self.count(*tensor) for tensor in tensors]

    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """See ``Rows``."""
        return [self.count_update(*pair) for pair in pairs]

    def count_update(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int]:
        """See ``Rows``. Both are flat, dense, of equal length and layout."""
        before, after = before.float(), after.float()
        weights, updates, facts = self._scratch, self._updates, self._facts
        try:
            kernels().count_update(
                before.data_ptr(),
                after.data_ptr(),
                before.numel(),
                weights.row,
                weights.edges,
                updates.row,
                updates.edges,
                facts,
                weights.work,
                updates.work,
            )
            return self._keep(weights), self._keep(updates), self._ratios.append(facts)
        except BaseException:
            self._make_scratch()
            raise

    def _keep(self, scratch: Scratch) -> int:
        """Keep what was counted in scratch memory as a row."""
        rows = self._counts
        used = numba_kernels.keep_counts(
            scratch.row, scratch.edges, 1, 0, rows.rows, *rows.room(), rows.edges
        )
        return rows.added(used)

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
