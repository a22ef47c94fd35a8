"""Analyzing a run that outgrows memory: 2,000 layers × 2,000 steps × 4 ranks, on generated rows.

    python benchmarks/larger_than_memory.py [--steps 2000] [--layers 2000] [--ranks 4] [--keep FOLDER]

Writes the run (activation gradients, one row for each layer, step and rank: 16 million), analyzes it
in a fresh process and prints the seconds and the peak of that process's memory, its imports included,
beside the size of the parts. Rows are generated once for a few steps and then only renumbered.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from mpdiag.numerics.histograms import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.runs.schema import encode
from mpdiag.runs.writer import RunWriter

PATTERNS = 4
"""Steps that are generated; the others repeat them."""
OCCUPIED = 25


def rows(layers: int, seed: int) -> pa.Table:
    """One step of one rank."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((layers, BINS), np.int64)
    low = 90 - rng.integers(0, 20, layers)
    for i in range(OCCUPIED):
        counts[np.arange(layers), low + i] = rng.integers(1, 5000, layers)
    scale = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=float))
    none = np.zeros(layers, np.int64)
    # Each step's largest gradient differs, as in a training.
    top = np.exp2(low + float(OCCUPIED) + MIN_EXPONENT) * rng.uniform(0.6, 1.0, layers)
    stack = ExponentHistogram(
        *(MIN_EXPONENT, counts, counts * scale * 1.4, none, none, none, none, none, top),
        np.exp2(low + 0.5 + MIN_EXPONENT),
    )
    labels = dict.fromkeys(("step", "micro", "rank"), none)
    labels |= {"tensors": none + 1, "scale": none + 1.0, "skipped": none > 0}
    labels |= {"kind": ["activation_grad"] * layers, "name": [f"layers.{i}" for i in range(layers)]}
    labels |= {
        name: ["float32" if name == "dtype" else "local"] * layers
        for name in ("dtype", "placement", "stage")
    }
    return encode(stack, labels)


def write(folder: Path, layers: int, steps: int, ranks: int, part: int = 20) -> int:
    """A run of generated rows, ``part`` steps in each part; returns its rows."""
    for rank in range(ranks):
        writer = RunWriter(folder, rank=rank, world_size=ranks)
        writer.write_meta({"state": "complete", "steps_recorded": steps, "world_size": ranks})
        patterns = [rows(layers, rank * PATTERNS + i) for i in range(PATTERNS)]
        for begin in range(0, steps, part):
            pieces = [
                _renumbered(patterns[step % PATTERNS], step, rank)
                for step in range(begin, min(begin + part, steps))
            ]
            writer.append(pa.concat_tables(pieces).unify_dictionaries())
    return layers * steps * ranks


def _renumbered(table: pa.Table, step: int, rank: int) -> pa.Table:
    for name, value in (("step", step), ("rank", rank)):
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        column = pa.array(np.full(len(table), value), field.type)
        table = table.set_column(at, field, column)
    return table


def measure(folder: str, stream_from: int | None = None) -> tuple[float, float]:
    """Seconds and peak memory in MB of a fresh process that analyzes a run."""
    limit = "" if stream_from is None else f"run_statistics.STREAM_FROM = {stream_from};"
    code = (
        "import sys, time; from mpdiag.analysis import run_statistics;"
        f"{limit} from mpdiag.analysis.analyzer import analyze;"
        "start = time.perf_counter(); analyze(sys.argv[1]).to_json();"
        "print(time.perf_counter() - start); print(open('/proc/self/status').read())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    seconds, _, status = child.stdout.partition("\n")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found
    return float(seconds), int(found[1]) / 1024


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 2000), ("steps", 2000), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="write the run here, and leave it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary) / "run"
        start = time.perf_counter()
        count = write(folder, given.layers, given.steps, given.ranks)
        writing = time.perf_counter() - start
        size = sum(p.stat().st_size for p in (folder / "stats").iterdir()) / 2**20
        seconds, peak = measure(str(folder))
    print(f"{count:,} rows, {size:,.0f} MB of parts, written in {writing:.0f} s")
    print(f"analyzed in {seconds:.0f} s with a peak of {peak:,.0f} MB")


if __name__ == "__main__":
    main()
