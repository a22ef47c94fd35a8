"""What the precision audit costs: steps of a recorded training over those of the same, unrecorded.

    python benchmarks/audit.py [--steps 120] [--json FILE]

Two copies of a transformer take turns step by step, one of them recorded at the default cadence, which
reads the precision, too. Figures are processor time, which a busy machine disturbs least: the median and
the mean ratio of pairs of steps after the first 20, all of which are recorded; the median of those; and
what the very first step takes more. Both copies must end with the same bits. Casts of a model are timed
with and without the watch on who gives parameters their dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from machine import machine
from recording import Trainee
from torch import nn

import mpdiag
from mpdiag.tracing.dtype_setters import DtypeSetters

DENSE = 20
"""Steps that are recorded at any cost."""
DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def steps(name: str, count: int) -> dict[str, Any]:
    """The cost of recording a training whose weights have a dtype.

    Raises:
        RuntimeError: If recording changed the weights.
    """
    pair = [Trainee("transformer", "cpu", time.process_time) for _ in range(2)]
    for trainee in pair:
        trainee.model.to(DTYPES[name])
    plain, audited = pair
    with (
        tempfile.TemporaryDirectory() as place,
        mpdiag.record(audited.model, audited.optimizer, Path(place) / "run") as recorder,
    ):
        times = [(plain.step(), audited.step()) for _ in range(count)]
        if recorder.failures:
            raise RuntimeError(recorder.failures)
    weights = zip(plain.model.parameters(), audited.model.parameters(), strict=True)
    if not all(torch.equal(a, b) for a, b in weights):
        raise RuntimeError("recording changed the weights")
    (first_plain, first_audited), *dense = times[: DENSE + 1]
    later = times[DENSE + 1 :]

    def ratio(pairs: Sequence[tuple[float, float]]) -> float:
        return round(statistics.median(audited / plain for plain, audited in pairs), 3)

    return {
        "weights": name,
        "milliseconds": round(1e3 * statistics.median(plain for plain, _ in later), 1),
        "ratio": ratio(later),
        "mean_ratio": round(sum(b for _, b in later) / sum(a for a, _ in later), 3),
        "ratio_of_first_steps": ratio(dense),
        "first_step_seconds_more": round(first_audited - first_plain, 2),
        "steps_recorded": recorder.steps_recorded,
    }


def casts() -> Iterator[dict[str, Any]]:
    """What a cast of 2,000 modules takes, with the watch and without it."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2000)))
    for name, call in (
        ("to(device): no dtype changes", lambda: model.to("cpu")),
        ("bfloat16() and float()", lambda: model.bfloat16().float()),
    ):
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(7):
            for watched, found in taken.items():
                setters = DtypeSetters()
                if watched:
                    setters.attach()
                start = time.process_time()
                call()
                found.append(1e3 * (time.process_time() - start))
                setters.detach()
        yield {
            "cast": name,
            "milliseconds": round(min(taken[False]), 1),
            "watched": round(min(taken[True]), 1),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in casts():
        print(row, flush=True)
        rows.append(row)
    for name in DTYPES:
        rows.append(steps(name, options.steps))
        print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(clock="processor"), "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
