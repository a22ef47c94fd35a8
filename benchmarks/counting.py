"""How fast tensors are counted, as a ratio to ``torch.aminmax``, which only reads them.

    python benchmarks/counting.py [--threads N] [--quick] [--json FILE]

aminmax, the counter and its plain kernel (tables, one increment a value) take turns on the same
tensor, each timed by the processor time of its thread where there is one; figures are of the fastest
rounds. A ratio of 1 would be counting at the speed of reading. ``count`` is all that a hook calls, and
``update`` counts weights, updates and what 16-bit weights would have made of them, beside two aminmax.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.recording.counting import host
from mpdiag.recording.counting.host import COMPARING, PLAIN, HostRows, Kernels

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


def counter(kernels: Kernels, values: torch.Tensor) -> Callable[[], None]:
    """Count these values with these kernels."""
    rows = HostRows()

    def count() -> None:
        with_these(kernels)
        rows.count(values)
        rows.clear()

    return count


def updater(kernels: Kernels, before: torch.Tensor, after: torch.Tensor) -> Callable[[], None]:
    """Count this update with these kernels."""
    rows = HostRows()

    def count() -> None:
        with_these(kernels)
        rows.count_update(before, after)
        rows.clear()

    return count


def with_these(kernels: Kernels) -> None:
    """Count with these kernels from now on."""
    host.kernels = lambda: kernels


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
                counters = [counter(k, values) for k in (COMPARING, PLAIN)]
                yield size, name, dtype, reader(values), counters
        before = torch.randn(size) * 0.05
        after = before + torch.randn(size) * 1e-4
        counters = [updater(k, before, after) for k in (COMPARING, PLAIN)]
        yield size, "update", torch.float32, reader(before, after), counters


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
    print(f"{'values':>12} {'data':12} {'dtype':9} {'ratio':>7} {'tables':>7} {'G values/s':>11}")
    for size, name, dtype, read, counters in cases(options.quick):
        for count in counters:
            count()
        reading, new, old = fastest([read, *counters], size, options.threads)
        row = {
            "values": size,
            "data": name,
            "dtype": str(dtype).removeprefix("torch."),
            "ratio": round(reading / new, 3),
            "ratio_of_tables": round(reading / old, 3),
            "g_values_per_second": round(size / new / 1e9, 2),
        }
        rows.append(row)
        print(
            f"{size:12,} {name:12} {row['dtype']:9} {row['ratio']:7.2f} "
            f"{row['ratio_of_tables']:7.2f} {row['g_values_per_second']:11.2f}",
            flush=True,
        )
    if options.json:
        facts = {
            "processor": platform.processor() or platform.machine(),
            "threads": options.threads,
            "torch": torch.__version__,
            "date": date.today().isoformat(),
        }
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
