"""Raw rows on an accelerator: filled without ever waiting for it, read back by ``read`` alone.

Triton counts on CUDA; plain torch operations do everywhere else. Both count integers by integer
atomics or sorts of indices, so results do not depend on the order of execution.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.recording.counting import layout, torch_operations
from mpdiag.recording.counting.rows import RawRows
from mpdiag.recording.counting.torch_operations import Counter

logger = logging.getLogger("mpdiag")


class DeviceRows:
    """Raw rows in device tensors.

    Args:
        device: Where the counted tensors live.
        capacity: Rows to begin with; grows by doubling, which waits for nothing.
        counter: What counts into a row; chosen by device when not given.
    """

    def __init__(
        self,
        device: torch.device,
        capacity: int = 256,
        counter: Counter | None = None,
    ) -> None:
        self.device = device
        self._counter = counter or best_counter(device)
        # The host knows how many values a row counts: (values, repeat, further zeros).
        self._sizes: list[tuple[int, int, int]] = []
        self._wide: list[int] = []  # rows of float64 values
        self._updates = 0
        self._counts = self._zeros(capacity, layout.RAW)
        self._extremes = self._no_extremes(capacity)
        self._facts = self._zeros(capacity, layout.UPDATE)
        self._ratios = self._zeros(capacity, layout.RATIO_BINS)

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64, device=self.device)

    def _no_extremes(self, rows: int) -> torch.Tensor:
        edges = self._zeros(rows, 2)
        edges[:, 1].fill_(torch_operations.NO_LOWEST)
        return edges

    @torch.no_grad()
    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """Count a tensor into a new row, in one launch; see ``rows.Rows``."""
        row = self._new_row(values.numel(), repeat, zeros, values.dtype == torch.float64)
        if values.numel():
            self._counter.values(values, self._counts[row], self._extremes[row])
        return row

    @torch.no_grad()
    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """Count tensors into new rows, in one launch for each of their types; see ``rows.Rows``."""
        rows = [
            self._new_row(values.numel(), repeat, zeros, values.dtype == torch.float64)
            for values, repeat, zeros in tensors
        ]
        some = [(t[0], row) for t, row in zip(tensors, rows, strict=True) if t[0].numel()]
        if some:
            values, places = zip(*some, strict=True)
            self._counter.many(values, places, self._counts, self._extremes)
        return rows

    @torch.no_grad()
    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """Count updates into new rows, in one launch for each of their types; see ``rows.Rows``."""
        places = [self._new_pair(before.numel()) for before, _ in pairs]
        some = [(pair, place) for pair, place in zip(pairs, places, strict=True) if pair[0].numel()]
        if some:
            rows = self._counts, self._extremes, self._facts, self._ratios
            self._counter.many_updates([s[0] for s in some], [s[1] for s in some], *rows)
        return [(row, row + 1, fact) for row, fact in places]

    def read(self) -> RawRows:
        """See ``rows.Rows``: the one place that waits for the device."""
        used, updates = len(self._sizes), self._updates
        sizes, repeats, zeros = np.array(self._sizes, np.int64).reshape(-1, 3).T
        counts = _on_host(self._counts[:used]) * repeats[:, None]
        specials = counts[:, layout.INFS] + counts[:, layout.NANS]
        others = counts[:, : layout.QUARTERS].sum(1) + specials
        counts[:, layout.ZEROS] = sizes * repeats + zeros - others
        return RawRows(
            counts=counts,
            extremes=_decoded(_on_host(self._extremes[:used]), self._wide),
            facts=_on_host(self._facts[:updates]),
            ratios=_on_host(self._ratios[:updates]),
        )

    def clear(self) -> None:
        """Forget all rows, on the device; see ``rows.Rows``."""
        used, updates = len(self._sizes), self._updates
        self._counts[:used] = 0
        self._extremes[:used, 0].fill_(0)
        self._extremes[:used, 1].fill_(torch_operations.NO_LOWEST)
        self._facts[:updates] = 0
        self._ratios[:updates] = 0
        self._sizes, self._wide, self._updates = [], [], 0

    def _new_row(self, size: int, repeat: int = 1, zeros: int = 0, wide: bool = False) -> int:
        row = len(self._sizes)
        if row == len(self._counts):
            self._counts = torch.cat([self._counts, self._zeros(row, layout.RAW)])
            self._extremes = torch.cat([self._extremes, self._no_extremes(row)])
        if wide:
            self._wide.append(row)
        self._sizes.append((size, repeat, zeros))
        return row

    def _new_pair(self, size: int) -> tuple[int, int]:
        """Two rows for an update, of weights and of changes, counted as float32; a row of facts."""
        row = self._new_row(size)
        self._new_row(size)
        if self._updates == len(self._facts):
            more = len(self._facts)
            self._facts = torch.cat([self._facts, self._zeros(more, layout.UPDATE)])
            self._ratios = torch.cat([self._ratios, self._zeros(more, layout.RATIO_BINS)])
        self._updates += 1
        return row, self._updates - 1


def _on_host(rows: torch.Tensor) -> NDArray[np.int64]:
    found: NDArray[np.int64] = rows.to("cpu", copy=True).numpy()
    return found


def _decoded(patterns: NDArray[np.int64], wide: list[int]) -> NDArray[np.float64]:
    """Extremes of rows, float64 (n, 2), from bit patterns: float64's in these rows, or float32's."""
    none = patterns[:, 1] == torch_operations.NO_LOWEST
    extremes = patterns.astype(np.int32).view(np.float32).astype(np.float64)
    extremes[wide] = patterns[wide].view(np.float64)
    extremes[none, 1] = np.inf
    return extremes


@functools.cache
def best_counter(device: torch.device) -> Counter:
    """Triton on CUDA where it works, torch operations otherwise."""
    if device.type != "cuda" or why_not_triton(device):
        return torch_operations.COUNTER
    from mpdiag.recording.counting import triton_kernels

    return triton_kernels.COUNTER


@functools.cache
def why_not_triton(device: torch.device) -> str:
    """Why Triton cannot count on a device; empty if it can.

    Triton needs a C compiler and Python's headers at its first launch, which a container may lack though
    Triton is installed: so one value is counted. Nobody waits for the result.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from mpdiag.recording.counting import triton_kernels

        one = torch.ones(1, device=device)
        counts = torch.zeros(layout.RAW, dtype=torch.int64, device=device)
        extremes = torch.zeros(2, dtype=torch.int64, device=device)
        triton_kernels.COUNTER.values(one, counts, extremes)
    except Exception as error:  # noqa: BLE001 - whatever it is, torch can count
        reason = " ".join(str(error).split())[:300]
        said = f"Triton does not work here ({type(error).__name__}: {reason})"
        logger.warning("%s: torch operations count instead, which takes longer", said)
        return said
    return ""
