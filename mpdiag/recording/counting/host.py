"""Counting on the host, and which counter a device gets.

On the CPU raw rows are numpy arrays filled by Numba kernels; on an accelerator they are one device
tensor filled by Triton, or by plain torch operations, without waiting for the device until ``read``.
Counts are integers, so every way of splitting the work gives the same result.
"""

import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.recording.counting import layout, numba_kernels
from mpdiag.recording.counting.rows import RawRows, Rows
from mpdiag.recording.counting.tensors import KINDS
from mpdiag.recording.lifecycle import signals_held


def rows_on(device: torch.device) -> Rows:
    """Raw rows for tensors on this device; its kernels are loaded."""
    if device.type == "cpu":
        prepare()
        return HostRows()
    from mpdiag.recording.counting.device import DeviceRows

    return DeviceRows(device)


_FIRST_ROWS = 64
_KEPT_ROWS = 4096
"""Rows whose memory, 8 KB each, is kept for the next ones."""
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


@cache
def prepare() -> None:
    """Load the kernels now; the first time after an installation Numba compiles them, for some 10 s."""
    with signals_held():
        rows, values = HostRows(), torch.ones(1)
        rows.count(values)
        rows.count_many([(values, 1, 0)])
        rows.count_many_updates([(values, values)])
        numba_kernels.count_values(values.data_ptr(), 1, layout.FLOAT32, _scratch())


class HostRows:
    """Raw rows in memory, filled by the Numba kernels; one thread at a time."""

    def __init__(self) -> None:
        self._scratch, self._updates = _scratch(), _scratch()
        self._make(_FIRST_ROWS)
        self._facts = np.zeros((_FIRST_ROWS, numba_kernels.UPDATE_ROW), np.int64)
        self._counted = self._compared = 0

    def _make(self, rows: int) -> None:
        self._counts = np.empty((rows, layout.RAW), np.int64)
        self._edges = np.empty((rows, 2))

    def _take(self, more: int) -> slice:
        """So many new rows."""
        start, stop = self._counted, self._counted + more
        if stop > len(self._counts):
            counts, edges = self._counts, self._edges
            self._make(max(2 * len(counts), stop))
            self._counts[:start], self._edges[:start] = counts[:start], edges[:start]
        self._counted = stop
        return slice(start, stop)

    def _take_facts(self, more: int) -> slice:
        """So many new rows of facts, zeros."""
        start, stop = self._compared, self._compared + more
        if stop > len(self._facts):
            facts = np.empty((max(2 * start, stop), numba_kernels.UPDATE_ROW), np.int64)
            facts[:start] = self._facts[:start]
            self._facts = facts
        self._facts[start:stop] = 0
        self._compared = stop
        return slice(start, stop)

    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """See ``Rows``. Others than the types of ``layout`` are read as float32, in portions."""
        kind = KINDS.get(values.dtype)
        address, n, scratch = values.data_ptr(), values.numel(), self._scratch
        if kind is None:
            kind, scratch, n = layout.FLOAT32, _count_copied(values), 0
        elif n >= _SHARED:
            scratch, n = _count_shared(values, kind), 0
        what = address, n, kind, repeat, zeros
        row: int = self._take(1).start
        numba_kernels.count_row(*what, scratch, self._counts, self._edges, row)
        return row

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """See ``Rows``: in one call of the kernel, but for tensors that several threads count."""
        few = all(v.dtype in KINDS and v.numel() < _SHARED for v, _, _ in tensors)
        if not few or not tensors:
            return [self.count(*tensor) for tensor in tensors]
        items = [(v.data_ptr(), v.numel(), KINDS[v.dtype], *further) for v, *further in tensors]
        rows = self._take(len(items))
        counts, edges = self._counts[rows], self._edges[rows]
        numba_kernels.count_rows(np.array(items, np.int64), self._scratch, counts, edges)
        return list(range(rows.start, rows.stop))

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
        items = [(before.data_ptr(), after.data_ptr(), before.numel()) for before, after in pairs]
        rows, facts = self._take(2 * len(items)), self._take_facts(len(items))
        numba_kernels.count_updates(
            np.array(items, np.int64).reshape(-1, 3),
            self._scratch,
            self._updates,
            self._counts[rows],
            self._edges[rows],
            self._facts[facts],
        )
        row, fact = rows.start, facts.start
        return [(row + 2 * i, row + 2 * i + 1, fact + i) for i in range(len(items))]

    def read(self) -> RawRows:
        """All rows counted since the last ``clear``; see ``Rows``."""
        facts = self._facts[: self._compared]
        return RawRows(
            counts=self._counts[: self._counted],
            extremes=self._edges[: self._counted],
            facts=facts[:, layout.RATIO_BINS :],
            ratios=facts[:, : layout.RATIO_BINS],
        )

    def clear(self) -> None:
        """Forget all rows, and give back memory that only a very large step needs."""
        self._counted = self._compared = 0
        if len(self._counts) > _KEPT_ROWS:
            self._make(_FIRST_ROWS)
            self._facts = self._facts[:_FIRST_ROWS].copy()


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has the pool's object but none of its threads."""
    global _pool  # noqa: PLW0603
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _count_copied(values: torch.Tensor) -> NDArray[np.int64]:
    """Count values of a type that kernels do not read, in scratch memory of its own."""
    mine = _scratch()
    for part in values.split(_PORTION):
        copied = part.float()
        numba_kernels.count_values(copied.data_ptr(), copied.numel(), layout.FLOAT32, mine)
    return mine


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
