"""Counting on CUDA: one launch for a tensor, one for an update, one for many of either.

Kernels get addresses, so nothing is compiled apart for where a tensor lies.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton

from mpdiag.recording.counting import triton_kernel
from mpdiag.recording.counting.torch_operations import Counter

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK = 4096
_UPDATE_BLOCK = 2048
_WARPS = 8
_SECTION = 8
"""Blocks of a program where many tensors are counted at once."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""As in the kernels."""


def _count_values(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    kind, values = _readable(values)
    n = values.numel()
    programs = min(triton.cdiv(n, _BLOCK), _most_programs(values.device))
    with _on(values.device):
        triton_kernel.one[(programs,)](
            values.data_ptr(), n, counts, extremes, KIND=kind, BLOCK=_BLOCK, **_limits(kind)
        )


def _count_update(
    before: torch.Tensor,
    after: torch.Tensor,
    counts: torch.Tensor,
    extremes: torch.Tensor,
    facts: torch.Tensor,
    ratios: torch.Tensor,
) -> None:
    kind, before, after = _readable_update(before, after)
    n, rows = before.numel(), (counts, extremes, facts, ratios)
    programs = min(triton.cdiv(n, _UPDATE_BLOCK), _most_programs(before.device))
    with _on(before.device):
        triton_kernel.update[(programs,)](
            before.data_ptr(),
            after.data_ptr(),
            n,
            *rows,
            KIND=kind,
            BLOCK=_UPDATE_BLOCK,
            **_limits(None),
        )


def _count_many(
    values: Sequence[torch.Tensor],
    rows: Sequence[int],
    counts: torch.Tensor,
    extremes: torch.Tensor,
) -> None:
    tables: dict[int, list[list[int]]] = {}
    read = [_readable(v) for v in values]  # alive until all is launched
    for (kind, tensor), row in zip(read, rows, strict=True):
        tables.setdefault(kind, []).append([tensor.data_ptr(), tensor.numel(), row])
    for kind, entries in tables.items():
        table, programs = _table(entries, 1, _SECTION * _BLOCK, counts.device)
        with _on(counts.device):
            triton_kernel.many[(programs,)](
                table,
                len(entries),
                counts,
                extremes,
                KIND=kind,
                BLOCK=_BLOCK,
                SECTION=_SECTION,
                **_limits(kind),
            )


def _count_many_updates(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[tuple[int, int]],
    counts: torch.Tensor,
    extremes: torch.Tensor,
    facts: torch.Tensor,
    ratios: torch.Tensor,
) -> None:
    tables: dict[int, list[list[int]]] = {}
    read = [_readable_update(*pair) for pair in pairs]
    for (kind, before, after), (row, fact) in zip(read, rows, strict=True):
        entry = [before.data_ptr(), after.data_ptr(), before.numel(), row, fact]
        tables.setdefault(kind, []).append(entry)
    for kind, entries in tables.items():
        table, programs = _table(entries, 2, _SECTION * _UPDATE_BLOCK, counts.device)
        with _on(counts.device):
            triton_kernel.many_updates[(programs,)](
                table,
                len(entries),
                counts,
                extremes,
                facts,
                ratios,
                KIND=kind,
                BLOCK=_UPDATE_BLOCK,
                SECTION=_SECTION,
                **_limits(None),
            )


COUNTER = Counter("Triton", _count_values, _count_update, _count_many, _count_many_updates)
"""Counts by these kernels; waits for nothing."""


@functools.cache
def _limits(kind: int | None) -> dict[str, int]:
    """Warps, and registers of a thread: chosen for sm_90 by ptxas, where float64 spills 16 bytes.

    With 80 an SM holds three programs, with 128 two, so that one reads while others count.

    Args:
        kind: The type of the values that are counted, None for an update.
    """
    if torch.version.hip is not None:
        return {"num_warps": _WARPS}
    wide = kind is None or kind == _KINDS[torch.float64]
    return {"num_warps": _WARPS, "maxnreg": 128 if wide else 80}


def _readable(values: torch.Tensor) -> tuple[int, torch.Tensor]:
    kind = _KINDS.get(values.dtype)
    return (0, values.float()) if kind is None else (kind, values)


def _readable_update(
    before: torch.Tensor, after: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    if before.dtype != after.dtype or before.dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        before, after = before.float(), after.float()
    return _KINDS[before.dtype], before, after


def _table(
    entries: list[list[int]], size: int, section: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """A table of tensors on their device, and how many programs serve it.

    Torch keeps page-locked memory for further use, once the copy from it is done; so the copy waits
    for nothing and no buffer is overwritten under way.

    Args:
        entries: What each tensor is, without its first program, which is added.
        size: The column of sizes.
        section: Values of a program.
        device: Where the tensors are.
    """
    programs = 0
    for entry in entries:
        entry.append(programs)
        programs += triton.cdiv(entry[size], section)
    table = torch.tensor(entries, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), programs


@functools.cache
def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return 8 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device if device.type == "cuda" else -1)
