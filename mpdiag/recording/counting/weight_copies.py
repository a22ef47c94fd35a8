"""Copies of parameters from before an optimizer's step, in bounded memory.

An update is the difference of a weight after a step and before it, so the weights are copied before.
Copies are whole while they fit a budget. Of parameters for which they do not, the same blocks are
copied in every step: they lie at equal distances, so that each part of a parameter has its share.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpdiag.recording.counting.tensors import Countable

BLOCK = 4096
"""Values copied together."""
_SMALL = 1 << 16
"""Of fewer values than this, a copy of its own takes longer to ask for than to make."""
SHARE = 0.25
"""Share of the memory free at the first recorded step that copies may take, where none is stated."""


class WeightCopies:
    """Decides how much of each parameter is copied, and copies it.

    Args:
        budget: Bytes that the copies of one optimizer's step may take on a device; None for ``SHARE``
            of what is free there.

    Raises:
        UsageError: If the budget is no number of bytes.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and (type(budget) is not int or budget < 0):
            message = f"copy_budget must be a number of bytes, 0 or more, not {budget!r}"
            raise UsageError(message)
        self._stated = budget
        self._budgets: dict[torch.device, float] = {}
        self._shares: dict[int, tuple[int, dict[torch.device, float]]] = {}

    def decide(self, key: int, parameters: Iterable[torch.Tensor]) -> None:
        """Decide what share of an optimizer's parameters is copied: once, so that it stays the same.

        Args:
            key: What the optimizer is known by.
            parameters: All that it steps. With further ones it is decided anew.
        """
        held = list(parameters)
        known = self._shares.get(key)
        if known is not None and known[0] == len(held):
            return
        sizes: dict[torch.device, int] = {}
        for parameter in held:
            local = getattr(parameter, "_local_tensor", parameter)  # of a distributed one, our part
            size = local.numel() * local.element_size()
            sizes[local.device] = sizes.get(local.device, 0) + size
        shares = {
            device: self._budget(device) / size if size else 1.0 for device, size in sizes.items()
        }
        self._shares[key] = len(held), shares

    def blocks(self, key: int, ready: Countable) -> torch.Tensor | None:
        """The blocks to copy of a parameter, int64 (k,), by number; None for all of it."""
        _, shares = self._shares[key]
        share = shares.get(ready.values.device, 1.0)
        whole = ready.values.numel() // BLOCK
        if share >= 1.0 or whole < 2:
            return None
        wanted = max(1, int(whole * share))
        numbers = torch.arange(wanted, device=ready.values.device)
        return torch.div(numbers * whole, wanted, rounding_mode="floor")

    def _budget(self, device: torch.device) -> float:
        if self._stated is not None:
            return float(self._stated)
        if device not in self._budgets:
            free = free_memory(device)
            self._budgets[device] = float("inf") if free is None else SHARE * free
        return self._budgets[device]


def sampled(ready: Countable, blocks: torch.Tensor | None) -> Countable:
    """A parameter's values for an update: a view of all of them, or a copy of some blocks."""
    if blocks is None:
        return ready
    whole = ready.values.numel() // BLOCK
    rows = ready.values[: whole * BLOCK].view(whole, BLOCK)
    return ready._replace(values=rows.index_select(0, blocks).view(-1), shared=False, version=None)


def copied(ready: Countable, blocks: torch.Tensor | None) -> Countable:
    """A copy of a parameter's values, or of some blocks of them."""
    some = sampled(ready, blocks)
    values = some.values.clone() if some.shared else some.values
    return some._replace(values=values, shared=False, version=None)


def all_copied(
    tensors: Sequence[tuple[Countable, torch.Tensor | None]],
) -> list[Countable]:
    """``copied`` for each of them; small tensors of one type are copied together, into one."""
    found: dict[int, Countable] = {}
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, (ready, blocks) in enumerate(tensors):
        if blocks is None and ready.shared and ready.values.numel() < _SMALL:
            small.setdefault((ready.values.dtype, ready.values.device), []).append(i)
        else:
            found[i] = copied(ready, blocks)
    for places in small.values():
        values = [tensors[i][0].values for i in places]
        copies = torch.cat(values).split([v.numel() for v in values])
        for i, copy in zip(places, copies, strict=True):
            found[i] = tensors[i][0]._replace(values=copy, shared=False, version=None)
    return [found[i] for i in range(len(tensors))]


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device, None where it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    found = [free for free in (_available(), _left_in_group()) if free is not None]
    return min(found, default=None)


def _available() -> int | None:
    """What the system can give without swapping."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves."""
    with suppress(OSError, ValueError):  # no such file, or the word "max": no limit
        limit = int((folder / "memory.max").read_text())
        return max(0, limit - int((folder / "memory.current").read_text()))
    return None
