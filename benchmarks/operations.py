"""What recording every operation costs: the time of such a step over the time of a plain one.

    python benchmarks/operations.py [--repeats 5] [--workload cnn] [--json FILE]

Operations are recorded in steps 0, 10 and 100. Step 0 also compiles kernels, so what is timed is
step 10 with what it leaves to the next one, beside plain steps of the same model right before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from recording import WORKLOADS, Trainee

import mpdiag


def measure(workload: str, repeats: int, device: str) -> tuple[float, float, int, int]:
    """Seconds of a plain step and of a recorded one, operations in it, bytes on disk."""
    trainee = Trainee(workload, device, time.perf_counter)
    plain, recorded, count, size = [], [], 0, 0
    for _ in range(2):
        trainee.step()
    for _ in range(repeats):
        plain += [trainee.step() for _ in range(5)]
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            # Statistics in steps 0 and 10 alone, so that step 10 is the only other dear one.
            with mpdiag.record(trainee.model, trainee.optimizer, run, every=10):
                *_, dear, next_one = (trainee.step() for _ in range(12))
                recorded.append(dear + next_one)  # it is written when the next one begins
            operations = mpdiag.open_run(run).operations()
            count = sum(o.step == 10 for o in operations)
            size = max(p.stat().st_size for p in (run / "operations").iterdir())
    usual = statistics.median(plain)
    return usual, statistics.median(recorded) - usual, count, size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    results["load"] = os.getloadavg()[0]  # others' work on the machine is part of the figures
    print(f"{'workload':12} {'operations':>10} {'kB':>6} {'plain ms':>9} {'ratio':>6}")
    for workload in options.workload or WORKLOADS:
        plain, recorded, count, size = measure(workload, options.repeats, options.device)
        print(
            f"{workload:12} {count:10} {size / 1e3:6.0f} {plain * 1e3:9.1f} {recorded / plain:6.2f}",
            flush=True,
        )
        results[workload] = {
            "operations": count,
            "bytes": size,
            "plain_ms": round(plain * 1e3, 1),
            "ratio": round(recorded / plain, 3),
        }
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
