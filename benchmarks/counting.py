"""How fast tensors are counted, as a ratio to ``torch.aminmax``, which only reads them.

    python benchmarks/counting.py [--threads N] [--quick] [--json FILE]

aminmax and the counter take turns on the same tensor, each timed by the processor time of its thread
where there is one; figures are of the fastest rounds. A ratio of 1 would be counting at the speed of
reading. ``count`` is all that a hook calls, and ``update`` counts weights, updates and what 16-bit
weights would have made of them, beside two aminmax.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from machine import machine

from mpdiag.recording.counting.host import HostRows

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1_000, 4_096, 65_536, 1_000_000, 16_000_000)
DATA: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda n: torch.randn(n) * 1e-3,
    "relu": lambda n: torch.randn(n).relu(),
    "50 octaves": lambda n: torch.exp2(torch.rand(n) * 50 - 40),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fastest(functions: list[Callable[[], object]], size: int, threads: int) -> list[float]:
    """Seconds each takes in its fastest round, the functions in turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    repeats, rounds = max(1, min(400, 1_000_000 // size)), 15 if size < 4_000_000 else 5
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = clock()
            for _ in range(repeats):
                function()
            best[i] = min(best[i], (clock() - start) / repeats)
    return best


def counter(values: torch.Tensor) -> Callable[[], None]:
    """Count these values."""
    rows = HostRows()

    def count() -> None:
        rows.count(values)
        rows.clear()

    return count


def updater(before: torch.Tensor, after: torch.Tensor) -> Callable[[], None]:
    """Count this update."""
    rows = HostRows()

    def count() -> None:
        rows.count_many_updates([(before, after)])
        rows.clear()

    return count


def reader(*tensors: torch.Tensor) -> Callable[[], None]:
    """Read these tensors."""

    def read() -> None:
        for tensor in tensors:
            torch.aminmax(tensor)

    return read


def cases(quick: bool) -> Any:
    """Name, dtype and values of each case, and what is timed of it."""
    for size in SIZES[: 4 if quick else None]:
        for name, make in DATA.items():
            for dtype in DTYPES if name != "50 octaves" else DTYPES[:2]:
                values = make(size).to(dtype)
                yield size, name, dtype, reader(values), counter(values)
        before = torch.randn(size) * 0.05
        after = before + torch.randn(size) * 1e-4
        yield size, "update", torch.float32, reader(before, after), updater(before, after)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave the largest tensors out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    print(f"{'values':>12} {'data':12} {'dtype':9} {'ratio':>7} {'G values/s':>11}")
    for size, name, dtype, read, count in cases(options.quick):
        count()
        reading, counting = fastest([read, count], size, options.threads)
        row = {
            "values": size,
            "data": name,
            "dtype": str(dtype).removeprefix("torch."),
            "ratio": round(reading / counting, 3),
            "g_values_per_second": round(size / counting / 1e9, 2),
        }
        rows.append(row)
        print(
            f"{size:12,} {name:12} {row['dtype']:9} {row['ratio']:7.2f} "
            f"{row['g_values_per_second']:11.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
