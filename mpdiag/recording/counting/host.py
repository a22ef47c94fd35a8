"""Counting on the host, and which counter a device gets.

On the CPU raw rows are numpy arrays filled by Numba kernels; on an accelerator they are one device
tensor filled by Triton, or by plain torch operations, without waiting for the device until ``read``.
Counts are integers, so every way of splitting the work gives the same result.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpdiag.recording.counting import layout, numba_kernels
from mpdiag.recording.counting.rows import RawRows, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        width: Length of a row.
        tail: So many entries at a row's end are kept whatever they are.
    """

    def __init__(self, width: int, tail: int = 0) -> None:
        self._width = width
        self._tail = tail
        self._rows: list[tuple[int, NDArray[np.int64], NDArray[np.int64], Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: NDArray[np.int64], beside: Any = None) -> int:
        """Keep a row, int64 (width,), and what belongs to it; returns its number."""
        body = self._width - self._tail
        first, stop = numba_kernels.occupied(row, body)
        self._rows.append((first, row[first:stop].copy(), row[body:].copy(), beside))
        return len(self._rows) - 1

    def beside(self) -> list[Any]:
        """What belongs to each row, in their order."""
        return [row[3] for row in self._rows]

    def __getitem__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Some rows as they were, int64 (n, width)."""
        rows = np.zeros((len(indices), self._width), np.int64)
        body = self._width - self._tail
        for row, i in zip(rows, indices, strict=True):
            first, stretch, tail, _ = self._rows[i]
            row[first : first + len(stretch)] = stretch
            row[body:] = tail
        return rows


_SHARED = 1 << 21
"""Tensors of this many values and more are counted by several threads."""
_PORTION = 1 << 19


class HostRows:
    """Raw rows in memory, filled by the Numba kernels."""

    def __init__(self) -> None:
        self.clear()

    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """See ``Rows``. float32, bfloat16 and float64 are read in place, others as float32."""
        counts = np.zeros(layout.RAW, np.int64)
        kernel, values, dtype = _counter(values)
        bits = _array(values, dtype)
        extremes = numba_kernels.empty_extremes(wide=bits.dtype == np.uint64)
        if bits.size < _SHARED:
            kernel(bits, counts, extremes)
        else:
            _count_shared(kernel, bits, counts, extremes)
        if repeat != 1:
            counts *= repeat
        counts[layout.ZEROS] += zeros
        return self._counts.append(counts, _decoded(extremes))

    def count_update(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int]:
        """See ``Rows``. Both are flat, dense, of equal length and layout."""
        weights, updates = np.zeros(layout.RAW, np.int64), np.zeros(layout.RAW, np.int64)
        facts = np.zeros(layout.UPDATE, np.int64)
        ratios = np.zeros(layout.RATIO_BINS, np.int64)
        weight_extremes, update_extremes = (
            numba_kernels.empty_extremes(),
            numba_kernels.empty_extremes(),
        )
        before, after = before.float(), after.float()
        numba_kernels.count_update(
            _array(before, np.float32),
            _array(after, np.float32),
            weights,
            weight_extremes,
            updates,
            update_extremes,
            facts,
            ratios,
        )
        return (
            self._counts.append(weights, _decoded(weight_extremes)),
            self._counts.append(updates, _decoded(update_extremes)),
            self._ratios.append(ratios, facts),
        )

    def read(self) -> RawRows:
        """All rows counted since the last ``clear``; see ``Rows``."""
        return RawRows(
            counts=self._counts,
            extremes=np.array(self._counts.beside(), np.float64).reshape(-1, 2),
            facts=np.array(self._ratios.beside(), np.int64).reshape(-1, layout.UPDATE),
            ratios=self._ratios,
        )

    def clear(self) -> None:
        """Forget all rows; see ``Rows``."""
        self._counts = Packed(layout.RAW, tail=layout.RAW - layout.QUARTERS)
        self._ratios = Packed(layout.RATIO_BINS)


def _counter(
    values: torch.Tensor,
) -> tuple[Callable[..., None], torch.Tensor, type[np.unsignedinteger[Any]]]:
    """The kernel for these values, the values as it reads them, and the type of their bits."""
    if values.dtype == torch.bfloat16:
        return numba_kernels.count_bfloat16, values, np.uint16
    if values.dtype == torch.float64:
        return numba_kernels.count_float64, values, np.uint64
    return numba_kernels.count_float32, values.float(), np.uint32


def _array(values: torch.Tensor, dtype: type[np.generic]) -> NDArray[Any]:
    """A flat, dense tensor's memory as an array; it must not outlive the tensor.

    ``Tensor.numpy`` would make the storage impossible to resize from then on, and FSDP frees its
    gathered weights that way.
    """
    size = values.numel() * values.element_size()
    if size == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * size).from_address(values.data_ptr())
    return np.frombuffer(memoryview(memory), dtype)


def _decoded(extremes: NDArray[Any]) -> tuple[float, float]:
    wide = extremes.dtype == np.uint64
    highest, lowest = extremes.view(np.float64 if wide else np.float32)
    return float(highest), float(lowest) if highest > 0 else math.inf


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has the pool's object but none of its threads."""
    global _pool  # noqa: PLW0603
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _count_shared(
    kernel: Callable[..., None],
    bits: NDArray[Any],
    counts: NDArray[np.int64],
    extremes: NDArray[Any],
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
    last = -(-bits.size // _PORTION)

    def work() -> tuple[NDArray[np.int64], NDArray[Any]]:
        mine, edges = (
            np.zeros(layout.RAW, np.int64),
            numba_kernels.empty_extremes(bits.dtype == np.uint64),
        )
        while (i := next(portions)) < last:
            kernel(bits[i * _PORTION : (i + 1) * _PORTION], mine, edges)
        return mine, edges

    futures = [_pool.submit(work) for _ in range(helpers)] if _pool is not None else []
    results = [work()]
    results += [future.result() for future in futures if not future.cancel()]
    for mine, edges in results:
        counts += mine
        extremes[0] = max(extremes[0], edges[0])
        extremes[1] = min(extremes[1], edges[1])
