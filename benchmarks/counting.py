"""How fast tensors are counted, as a ratio to ``torch.aminmax``, which only reads them.

    python benchmarks/counting.py [--json FILE]

Counter and aminmax take turns on the same tensor; a ratio of 1 would be counting at the speed of
reading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from mpdiag.recording.counting.host import HostRows

SIZES = (4_096, 65_536, 1_000_000, 16_000_000)


def seconds(function, values: torch.Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function(values)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = []
    print(f"{'values':>12} {'ratio':>7} {'G values/s':>11}")
    for size in SIZES:
        values = torch.randn(size) * 1e-3
        counter = HostRows()
        counter.count(values)
        counter.clear()
        repeats = max(1, min(200, 4_000_000 // size))
        pairs = []
        for _ in range(9):
            reading = seconds(torch.aminmax, values, repeats)
            counting = seconds(counter.count, values, repeats)
            counter.clear()
            pairs.append((reading / counting, size / counting / 1e9))
        ratio, rate = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {"values": size, "ratio": round(ratio, 3), "g_values_per_second": round(rate, 2)}
        )
        print(f"{size:12,} {ratio:7.2f} {rate:11.2f}", flush=True)
    if options.json:
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
