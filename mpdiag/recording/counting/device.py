"""Raw rows on an accelerator: filled without ever waiting for it, read back by ``read`` alone.

Triton counts on CUDA; plain torch operations do everywhere else. Both count integers by integer
atomics or sorts of indices, so results do not depend on the order of execution.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpdiag.recording.counting import layout
from mpdiag.recording.counting.rows import RawRows

if TYPE_CHECKING:
    from collections.abc import Callable

    Tally = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

logger = logging.getLogger("mpdiag")

_PORTION = 1 << 24
"""Weight updates are compared in portions, so that temporaries stay small."""


class DeviceRows:
    """Raw rows in one device tensor.

    Args:
        device: Where the counted tensors live.
        capacity: Rows to begin with; grows by doubling, which waits for nothing.
        tally: How to count float32 values into a row; chosen by device when not given.
    """

    def __init__(
        self,
        device: torch.device,
        capacity: int = 256,
        tally: Tally | None = None,
    ) -> None:
        self.device = device
        self._tally = tally or best_tally(device)
        self._used = 0
        self._updates = 0
        self._counts = self._zeros(capacity, layout.RAW)
        self._extremes = self._no_extremes(capacity)
        self._facts = self._zeros(capacity, layout.UPDATE)
        self._ratios = self._zeros(capacity, layout.RAW)

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64, device=self.device)

    def _no_extremes(self, rows: int) -> torch.Tensor:
        edges = torch.zeros(rows, 2, dtype=torch.float64, device=self.device)
        edges[:, 1] = torch.inf
        return edges

    @torch.no_grad()
    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """Count a tensor into a new row; see ``rows.Rows``."""
        row = self._new_row()
        self._count_into(row, values)
        if repeat != 1:
            self._counts[row] *= repeat
        if zeros:
            self._counts[row, layout.ZEROS] += zeros
        return row

    @torch.no_grad()
    def count_update(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int]:
        """Count a weight update into new rows; see ``rows.Rows``."""
        weight_row, update_row = self._new_row(), self._new_row()
        fact = self._new_update()
        for start in range(0, before.numel(), _PORTION):
            w = before[start : start + _PORTION].float()
            delta = after[start : start + _PORTION].float() - w
            self._count_into(weight_row, w)
            self._count_into(update_row, delta)
            self._facts[fact] += update_facts(w, delta)
            # float64, where no quotient of two float32 values rounds onto a power of two it is not.
            ratio = torch.where(delta != 0, w.double().abs() / delta.double().abs(), torch.nan)
            self._tally(as_float32(ratio), self._ratios[fact], torch.zeros_like(self._extremes[0]))
        return weight_row, update_row, fact

    def read(self) -> RawRows:
        """See ``rows.Rows``: the one place that waits for the device."""
        used, updates = self._used, self._updates
        facts = self._facts[:updates].to("cpu", copy=True).numpy()
        raw_ratios = self._ratios[:updates].to("cpu", copy=True).numpy()
        return RawRows(
            counts=self._counts[:used].to("cpu", copy=True).numpy(),
            extremes=self._extremes[:used].to("cpu", copy=True).numpy(),
            facts=facts,
            ratios=_ratio_bins(raw_ratios),
        )

    def clear(self) -> None:
        """Forget all rows, on the device; see ``rows.Rows``."""
        used, updates = self._used, self._updates
        self._counts[:used] = 0
        self._extremes[:used] = self._no_extremes(used)
        self._facts[:updates] = 0
        self._ratios[:updates] = 0
        self._used = self._updates = 0

    def _count_into(self, row: int, values: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        if values.dtype == torch.float64:
            magnitude = values.abs()
            finite = torch.where(magnitude.isfinite(), magnitude, 0.0)
            nonzero = torch.where(finite > 0, finite, torch.inf)
            unused = torch.zeros(2, dtype=torch.float64, device=self.device)
            self._tally(as_float32(values), self._counts[row], unused)
            edges = self._extremes[row]
            edges[0] = torch.maximum(edges[0], finite.max())
            edges[1] = torch.minimum(edges[1], nonzero.min())
            return
        self._tally(values.float(), self._counts[row], self._extremes[row])

    def _new_row(self) -> int:
        if self._used == len(self._counts):
            more = len(self._counts)
            self._counts = torch.cat([self._counts, self._zeros(more, layout.RAW)])
            self._extremes = torch.cat([self._extremes, self._no_extremes(more)])
        self._used += 1
        return self._used - 1

    def _new_update(self) -> int:
        if self._updates == len(self._facts):
            more = len(self._facts)
            self._facts = torch.cat([self._facts, self._zeros(more, layout.UPDATE)])
            self._ratios = torch.cat([self._ratios, self._zeros(more, layout.RAW)])
        self._updates += 1
        return self._updates - 1


def update_facts(weights: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """What FP16 and BF16 weights would make of an update, by torch's own casts.

    Args:
        weights: float32 (n,), before the step.
        delta: float32 (n,), the change.

    Returns:
        int64 (``layout.UPDATE``,), on the same device.
    """
    changed = delta != 0
    w16, d16 = weights.half(), delta.half()
    wb, db = weights.bfloat16(), delta.bfloat16()
    return torch.stack(
        [
            changed.sum(),
            (changed & (w16 + d16 == w16)).sum(),
            (changed & (wb + db == wb)).sum(),
            (changed & (d16 == 0)).sum(),
            (changed & (weights == 0)).sum(),
        ]
    )


def as_float32(values: torch.Tensor) -> torch.Tensor:
    """float64 cut to float32 with every lost bit gathered in the last.

    So no value crosses a power of two; what is too small becomes the smallest subnormal, what is
    too large the largest value.
    """
    bits = values.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
    exponent = (bits >> 52) - 1023
    sticky = ((bits & 0x1FFFFFFF) != 0).to(torch.int64)
    head = ((exponent + 127) << 23) | ((bits & 0x000FFFFFFFFFFFFF) >> 29) | sticky
    head = torch.where(exponent < -126, 1, head)
    head = torch.where(exponent > 127, 0x7F7FFFFF, head)
    head = torch.where(bits == 0, 0, head)
    special = torch.where((bits & 0x000FFFFFFFFFFFFF) != 0, 0x7FC00000, layout.INFINITY)
    head = torch.where(exponent == 1024, special, head)
    return head.to(torch.int32).view(torch.float32)


def torch_tally(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    """Add float32 values to a raw row by torch operations alone; runs on every device.

    Args:
        values: float32 (n,), n > 0.
        counts: int64 (``layout.RAW``,), added to.
        extremes: float64 (2,), updated.
    """
    bits = values.view(torch.int32) & layout.MAGNITUDE
    index = ((bits - 1) >> 21) & (layout.TABLE - 1)  # zeros wrap to 1023
    table = torch.zeros(layout.TABLE, dtype=torch.int64, device=values.device)
    table.index_add_(0, index, torch.ones_like(index, dtype=torch.int64))
    nans, infs, zeros = bits > layout.INFINITY, bits == layout.INFINITY, bits == 0
    finite = ~(nans | infs)
    counts[: layout.QUARTERS] += table[: layout.QUARTERS]
    counts[layout.QUARTERS - 1] -= infs.sum()
    counts[layout.ZEROS] += zeros.sum()
    counts[layout.SUBNORMALS] += ((bits > 0) & (bits <= layout.LARGEST_SUBNORMAL)).sum()
    counts[layout.INFS] += infs.sum()
    counts[layout.NANS] += nans.sum()
    counts[layout.FP16_OVERFLOW] += (finite & (bits >= layout.OVERFLOW)).sum()
    magnitude = torch.where(finite, values.abs(), 0.0)
    extremes[0] = torch.maximum(extremes[0], magnitude.max().double())
    nonzero = torch.where(magnitude > 0, magnitude, torch.inf)
    extremes[1] = torch.minimum(extremes[1], nonzero.min().double())


@functools.cache
def best_tally(device: torch.device) -> Tally:
    """Triton on CUDA where it works, torch operations otherwise."""
    if device.type != "cuda" or why_not_triton(device):
        return torch_tally
    from mpdiag.recording.counting.triton_kernel import triton_tally

    return triton_tally


@functools.cache
def why_not_triton(device: torch.device) -> str:
    """Why Triton cannot count on a device; empty if it can.

    Triton needs a C compiler and Python's headers at its first launch, which a container may lack though
    Triton is installed: so one value is counted. Nobody waits for the result.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from mpdiag.recording.counting.triton_kernel import triton_tally

        one = torch.ones(1, device=device)
        counts = torch.zeros(layout.RAW, dtype=torch.int64, device=device)
        triton_tally(one, counts, torch.zeros(2, dtype=torch.float64, device=device))
    except Exception as error:  # noqa: BLE001 - whatever it is, torch can count
        reason = " ".join(str(error).split())[:300]
        said = f"Triton does not work here ({type(error).__name__}: {reason})"
        logger.warning("%s: torch operations count instead, which takes longer", said)
        return said
    return ""


def _ratio_bins(raw: np.ndarray) -> np.ndarray:
    """Raw rows of |w|/|Δw| to the columns of ``layout.RATIO_BINS``."""
    counts = raw[:, : layout.QUARTERS].reshape(len(raw), layout.QUARTERS // 4, 4).sum(-1)
    bins = np.zeros((len(raw), layout.RATIO_BINS), np.int64)
    first = -127 - layout.RATIO_FIRST
    bins[:, first : first + counts.shape[1]] = counts
    return bins
