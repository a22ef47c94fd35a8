"""Raw rows on an accelerator: filled without ever waiting for it, read back by ``read`` alone.

Triton counts on CUDA; plain torch operations do everywhere else. Both count integers by integer
atomics or sorts of indices, so results do not depend on the order of execution.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.recording.counting import layout, torch_operations
from mpdiag.recording.counting.rows import RawRows
from mpdiag.recording.counting.tensors import KINDS
from mpdiag.recording.counting.torch_operations import COUNTER as TORCH
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
        self, device: torch.device, capacity: int = 256, counter: Counter | None = None
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
        self._stream = current_stream(device)

    def _follow(self) -> None:
        """Let this stream wait for what the last one does with the rows; the host waits for nothing.

        Modules and their backward passes may run on streams of their own, while rows are counted into,
        grown, read and cleared in the order of the calls. Torch reuses the memory of rows that growing
        replaces only after this stream has read it.
        """
        now = current_stream(self.device)
        if now == self._stream:
            return
        now.wait_stream(self._stream)
        for rows in (self._counts, self._extremes, self._facts, self._ratios):
            rows.record_stream(now)
        self._stream = now

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64, device=self.device)

    def _no_extremes(self, rows: int) -> torch.Tensor:
        edges = self._zeros(rows, 2)
        edges[:, 1].fill_(torch_operations.NO_LOWEST)
        return edges

    def count(self, values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> int:
        """Count a tensor into a new row, in one launch; see ``rows.Rows``."""
        self._follow()
        row = self._new_row(values.numel(), repeat, zeros, values.dtype == torch.float64)
        if values.numel():
            self._counter.values(values, self._counts[row], self._extremes[row])
        return row

    def count_many(self, tensors: Sequence[tuple[torch.Tensor, int, int]]) -> list[int]:
        """Count tensors into new rows, in one launch for each of their types; see ``rows.Rows``."""
        self._follow()
        rows = [
            self._new_row(values.numel(), repeat, zeros, values.dtype == torch.float64)
            for values, repeat, zeros in tensors
        ]
        some = [(t[0], row) for t, row in zip(tensors, rows, strict=True) if t[0].numel()]
        if some:
            values, places = zip(*some, strict=True)
            self._counter.many(values, places, self._counts, self._extremes)
        return rows

    def count_many_updates(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[int, int, int]]:
        """Count updates into new rows, in one launch for each of their types; see ``rows.Rows``."""
        self._follow()
        places = [self._new_pair(before.numel()) for before, _ in pairs]
        some = [(pair, place) for pair, place in zip(pairs, places, strict=True) if pair[0].numel()]
        if some:
            rows = self._counts, self._extremes, self._facts, self._ratios
            self._counter.many_updates([s[0] for s in some], [s[1] for s in some], *rows)
        return [(row, row + 1, fact) for row, fact in places]

    def read(self) -> RawRows:
        """See ``rows.Rows``: the one place that waits for the device."""
        self._follow()
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
        self._follow()
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
    # From a GPU, page-locked memory is filled several times as fast as any other.
    host = torch.empty(
        rows.shape, dtype=rows.dtype, device="cpu", pin_memory=rows.device.type == "cuda"
    )
    found: NDArray[np.int64] = host.copy_(rows).numpy()
    return found


def _decoded(patterns: NDArray[np.int64], wide: list[int]) -> NDArray[np.float64]:
    """Extremes of rows, float64 (n, 2), from bit patterns: float64's in these rows, or float32's."""
    none = patterns[:, 1] == torch_operations.NO_LOWEST
    extremes = patterns.astype(np.int32).view(np.float32).astype(np.float64)
    extremes[wide] = patterns[wide].view(np.float64)
    extremes[none, 1] = np.inf
    return extremes


def current_stream(device: torch.device) -> Any:
    """The stream on which a device works now; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@functools.cache
def best_counter(device: torch.device) -> Counter:
    """Triton on CUDA, each kernel where it works, torch operations otherwise."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TORCH
    return _tried(device)


def _tried(device: torch.device) -> Counter:
    """A counter that asks of each kernel and type of values, before its first use, whether it works."""

    def of(part: Part, values: torch.Tensor) -> Counter:
        read = values.dtype in KINDS and (part, values.dtype) != ("many_updates", torch.float64)
        # Values that a kernel does not read are converted for it.
        if why_not_triton(device, part, values.dtype if read else torch.float32):
            return TORCH
        from mpdiag.recording.counting import triton_kernels

        return triton_kernels.COUNTER

    def values(tensor: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
        of("values", tensor).values(tensor, counts, extremes)

    def many(tensors: Sequence[torch.Tensor], rows: Sequence[int], *into: torch.Tensor) -> None:
        for counter, chosen in _shared([of("many", tensor) for tensor in tensors]):
            counter.many([tensors[i] for i in chosen], [rows[i] for i in chosen], *into)

    def many_updates(
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Sequence[tuple[int, int]],
        *into: torch.Tensor,
    ) -> None:
        for counter, chosen in _shared([of("many_updates", before) for before, _ in pairs]):
            counter.many_updates([pairs[i] for i in chosen], [rows[i] for i in chosen], *into)

    return Counter("Triton", values, many, many_updates)


def _shared(counters: list[Counter]) -> list[tuple[Counter, list[int]]]:
    """Each of these counters once, with its places."""
    kinds = {id(counter): counter for counter in counters}
    return [(c, [i for i, one in enumerate(counters) if one is c]) for c in kinds.values()]


Part = Literal["values", "many", "many_updates"]
"""What a counter counts in a launch; see ``Counter``."""
PARTS: tuple[Part, ...] = ("values", "many", "many_updates")


@functools.cache
def why_not_triton(
    device: torch.device, part: Part = "values", dtype: torch.dtype = torch.float32
) -> str:
    """Why Triton cannot count on a device; empty if it can.

    Triton needs a C compiler and Python's headers at its first launch, which a container may lack though
    Triton is installed, and compiles a kernel for each type of values. So a few values are counted,
    and waited for: what they should give is known.

    Args:
        device: Where to count.
        part: What a launch counts.
        dtype: The type of its values; one of ``tensors.KINDS``.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from mpdiag.recording.counting import triton_kernels

        rows = [_trial(c, device, part, dtype) for c in (triton_kernels.COUNTER, TORCH)]
        if all(torch.equal(*both) for both in zip(*rows, strict=True)):
            return ""
        said = f"Triton counts {str(dtype).removeprefix('torch.')} wrongly here"
    except Exception as error:  # noqa: BLE001 - whatever it is, torch can count
        reason = " ".join(str(error).split())[:300]
        said = f"Triton does not work here ({type(error).__name__}: {reason})"
    _warn(said)
    return said


def _trial(
    counter: Counter, device: torch.device, part: Part, dtype: torch.dtype
) -> list[torch.Tensor]:
    """What a counter makes of a few values, on the host."""
    kinds = [0.0, 1.0, -1.5, 3.0, 1e-30, 6e4, torch.inf, torch.nan]
    values = torch.tensor(kinds, device=device).to(dtype)
    rows = DeviceRows(device, 2, counter)
    into = rows._counts, rows._extremes, rows._facts, rows._ratios
    if part == "values":
        for _ in range(2):  # compiled once, launched in another way from then on
            counter.values(values, into[0][0], into[1][0])
    elif part == "many":
        counter.many([values, values], [0, 1], *into[:2])
    else:
        counter.many_updates([(values, values * 1.25)], [(0, 0)], *into)
    return [rows.cpu() for rows in into]


@functools.cache
def _warn(said: str) -> None:
    logger.warning("%s: torch operations count instead, which takes longer", said)
