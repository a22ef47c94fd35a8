"""What a traced step costs: steps of a traced training over those of the same one, unrecorded.

    python benchmarks/tracing.py [--recordings 5] [--steps 9] [--device cpu] [--json FILE]

Two copies of a transformer take turns step by step. One is recorded, several times one after another.
Each time every second of its steps from step 2 on is traced; the first of these runs once more as its
twin. Figures are processor time, which a busy machine disturbs least (on a GPU the time until it has
ended its work): the median and the smallest ratio
of pairs of steps, of those with a twin, of those traced without one, and of those only recorded. Both
copies must end with the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from machine import machine
from recording import Trainee

import mpdiag


def main() -> None:
    """Measure and print.

    Raises:
        RuntimeError: If recording failed, changed the weights, or ran no twin.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    plain, traced = (Trainee("transformer", options.device, clock) for _ in range(2))
    chosen = range(2, options.steps, 2)
    milliseconds: list[float] = []
    ratios: dict[str, list[float]] = {"twin": [], "traced": [], "recorded": []}
    for _ in range(options.recordings):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            with mpdiag.record(traced.model, traced.optimizer, folder, trace=chosen) as recorder:
                times = [(plain.step(), traced.step()) for _ in range(options.steps)]
            run = mpdiag.open_run(folder)
            rows = [row for row in run.trace() if row.step in chosen]
            size = sum(file.stat().st_size for file in (folder / "trace").iterdir())
        weights = zip(plain.model.parameters(), traced.model.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in weights)
        known = {row.step for row in rows if row.spread is not None}
        if recorder.failures or not same or known != set(chosen):
            raise RuntimeError(f"not measured: {recorder.failures}, {run.meta['trace']}, {same=}")
        milliseconds += [1e3 * a for a, _ in times]
        for i, (a, b) in enumerate(times[1:], 1):
            kind = "twin" if i == chosen[0] else "traced" if i in chosen else "recorded"
            ratios[kind].append(b / a)
    found = {
        "milliseconds": round(statistics.median(milliseconds), 1),
        **{name: round(statistics.median(some), 2) for name, some in ratios.items()},
        **{f"{name}_smallest": round(min(some), 2) for name, some in ratios.items()},
        "tensors_of_a_step": len(rows) // len(chosen),
        "kilobytes_of_a_step": round(size / len(chosen) / 1e3),
    }
    print(found)
    if options.json:
        about = machine(clock="processor" if options.device == "cpu" else "wall")
        if options.device == "cuda":
            about["processor"] = torch.cuda.get_device_name()
        options.json.write_text(json.dumps({"machine": about, "rows": [found]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
