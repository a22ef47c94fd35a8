"""Check and unscale in one pass: each gradient is read, divided by the scale and written once.

The norm and the largest value of what is written come from the same pass, so they cost no reading of
their own. On a CPU memory is what takes the time: reading the gradients for a norm, then reading and
writing them again, takes one and a half times what is needed.

The pass has changed gradients before anyone knows whether the step may be taken; ``give_back`` undoes
it. It is used where that is exact but for values below FP32's normal range: of powers of two. Few
gradients, and others than dense FP32 ones on a CPU, are left to ``judgement``.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORTH = 1 << 20
"""Gradients from which the pass gains more than Numba's import, once, costs."""
_PORTION = 1 << 19
"""Values that a thread takes at a time."""
_LARGEST = torch.finfo(torch.float32).max


class Unscaled(NamedTuple):
    """What a pass has found in gradients that it divided by their scale.

    Attributes:
        norm: Their Euclidean norm before that, one FP32 number; infinite or NaN where one is, and
            infinite where its square leaves FP32's range.
        absmax: The largest of their magnitudes before that; infinite or NaN where one is.
    """

    norm: Tensor
    absmax: float


def unscaled(gradients: Sequence[Tensor], scale: float) -> Unscaled | None:
    """Divide dense FP32 gradients by a scale, in place, and say what they were.

    Args:
        gradients: Dense FP32 tensors on one device.
        scale: What they carry.

    Returns:
        None, with nothing changed, where the pass is not worth its while or would not be exact.
    """
    if scale <= 1.0 or math.frexp(scale)[0] != 0.5 or scale > 2.0**126:
        return None
    if sum(map(Tensor.numel, gradients)) < WORTH or not all(map(_is_memory, gradients)):
        return None
    if torch._C._len_torch_dispatch_stack() or (kernel := _kernel()) is None:
        return None
    squares, largest = _swept(kernel, gradients, 1.0 / scale)
    torch.autograd.graph.increment_version(gradients)
    if squares > _LARGEST:  # as in torch's norm, which adds the squares in FP32
        squares = math.inf
    norm = torch.full((), math.sqrt(squares), dtype=torch.float32, device="cpu")
    return Unscaled(norm, largest)


def give_back(gradients: Sequence[Tensor], scale: float) -> None:
    """Multiply gradients by the scale that ``unscaled`` has taken off."""
    torch._foreach_mul_(list(gradients), scale)


def _is_memory(gradient: Tensor) -> bool:
    """Whether a tensor is one piece of a CPU's memory that may be written to."""
    return (
        gradient.device.type == "cpu"
        and (
            gradient.is_contiguous()
            or (gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last))
        )
        and not gradient.requires_grad
        and not gradient.is_inference()
    )


@cache
def _kernel() -> Callable[..., None] | None:
    """The compiled pass; None where Numba cannot make it."""
    try:
        from mpdiag.training.gradients.one_pass import unscale_runs

        values = np.array([3.0, -8.0], np.float32)
        runs = _runs([(values.ctypes.data, 2)])
        unscale_runs(*runs, 0, 1, np.float32(0.5))
    except Exception:  # noqa: BLE001 - whatever Numba and LLVM refuse, torch can do
        return None
    ok = runs.squares[0] == 73.0 and runs.largest[0] == 8.0 and values[0] == 1.5
    return unscale_runs if ok else None


class _Runs(NamedTuple):
    """Where values lie, and what the pass finds in each run of memory.

    Attributes:
        addresses: int64 (runs,).
        sizes: int64 (runs,), values of each.
        squares: float64 (runs,), the sum of their squares.
        largest: float32 (runs,), the largest of their magnitudes.
    """

    addresses: Any
    sizes: Any
    squares: Any
    largest: Any


def _runs(places: Sequence[tuple[int, int]]) -> _Runs:
    table = np.array(places, np.int64)
    found = np.empty(len(table), np.float64), np.empty(len(table), np.float32)
    return _Runs(table[:, 0].copy(), table[:, 1].copy(), *found)


def _places(gradients: Sequence[Tensor], most: int) -> list[tuple[int, int]]:
    """Addresses and sizes of runs of at most so many values."""
    return [
        (gradient.data_ptr() + 4 * start, min(most, gradient.numel() - start))
        for gradient in gradients
        for start in range(0, gradient.numel(), most)
    ]


def _swept(
    kernel: Callable[..., None], gradients: Sequence[Tensor], factor: float
) -> tuple[float, float]:
    """Multiply gradients: the sum of the squares of what they were, and the largest magnitude.

    As many threads as torch uses take portions in turn. The sum is over runs of memory in their
    order, whichever thread has read them.
    """
    helpers = min(torch.get_num_threads(), 8) - 1
    runs = _runs(_places(gradients, _PORTION if helpers else 1 << 62))
    inverse, count = np.float32(factor), len(runs.sizes)
    if not helpers:
        kernel(*runs, 0, count, inverse)
        return math.fsum(runs.squares), float(runs.largest.max())
    bounds = _bounds(runs.sizes.tolist())
    portions = iter(range(len(bounds) - 1))

    def work() -> None:
        for i in portions:
            kernel(*runs, bounds[i], bounds[i + 1], inverse)

    # Torch's own threads may hold the processors still: a helper that gets none is not waited for.
    futures = [_pool().submit(work) for _ in range(helpers)]
    work()
    for future in futures:
        if not future.cancel():
            future.result()
    # A maximum of numpy is NaN where a value is.
    return math.fsum(runs.squares), float(runs.largest.max())


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Where portions of runs begin, of ``_PORTION`` values or one run, and where the last ends."""
    bounds, held = [0], 0
    for i, size in enumerate(sizes):
        if held and held + size > _PORTION:
            bounds.append(i)
            held = 0
        held += size
    return [*bounds, len(sizes)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(7, thread_name_prefix="mpdiag-unscale")


if hasattr(os, "register_at_fork"):  # a child has the pool's object but none of its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
