"""Times and memory, measured alike in every section."""

from __future__ import annotations

import gc
import math
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpu_sections.child import Context


def wait(device: str) -> None:
    """Wait for all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], object], count: int, device: str) -> float:
    """Seconds of a step, the mean of so many launched one after another."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - began) / count


def in_turns(
    ctx: Context,
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    count: int,
    warm: int,
    seconds: float = math.inf,
) -> dict[str, float]:
    """Median seconds of a step of each variant; the variants take turns, some steps each.

    Rounds that no longer fit into the part's time, or into ``seconds``, are left out.
    """
    for step in steps.values():
        for _ in range(warm):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = time.monotonic()
    for done in range(rounds):
        taken = time.monotonic() - began
        if done and taken / done > min(ctx.left, seconds - taken):
            break
        for name, step in steps.items():
            times[name].append(seconds_of(step, count, ctx.device))
    return {name: statistics.median(values) for name, values in times.items()}


def apart(*times: float) -> float:
    """How far repeated runs of the same thing lie apart: the longest over the shortest."""
    return max(times) / min(times)


def kernel_seconds(run: Callable[[], object], device: str, least: float = 0.05) -> float:
    """Seconds of a call, by CUDA events around as many as fill some time."""
    run()
    once = max(seconds_of(run, 2, device), 1e-6)
    count = max(3, min(1000, int(least / once)))
    if device != "cuda":
        return once
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def free(device: str) -> None:
    """Give back memory that nothing holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def peak(device: str) -> Iterator[Callable[[], int]]:
    """The most bytes allocated at once inside; 0 off a GPU."""
    free(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def most() -> int:
        return torch.cuda.max_memory_allocated() if device == "cuda" else 0

    yield most


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms wherever torch has them, attention by plain products and a softmax."""
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


def tf32(*, on: bool) -> None:
    """Whether FP32 products and convolutions may use TF32."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:,.0f} MiB"


def ratio(value: float) -> str:
    """A ratio with two decimals."""
    return f"{value:.2f}"
