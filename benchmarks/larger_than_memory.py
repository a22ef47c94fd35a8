"""Analyzing a run that outgrows memory, on generated rows.

    python benchmarks/larger_than_memory.py [--layers 2000] [--steps 397] [--ranks 1] [--keep FOLDER]

Writes the run, for each layer, step and rank the eight rows that a Linear layer leaves, analyzes it in a
fresh process and prints the seconds and the peak of that process's memory, its imports included, beside
the size of the parts. Rows are generated once for a few steps and then only renumbered.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mpdiag.numerics.histograms import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.runs.schema import UpdateStack, encode
from mpdiag.runs.writer import RunWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PATTERNS = 4
"""Steps that are generated; the others repeat them."""
OCCUPIED = 10


ROWS = (
    *(("activation", ""), ("activation_grad", "")),
    *(
        (kind, f".{name}")
        for kind in ("weight", "weight_grad", "update")
        for name in ("weight", "bias")
    ),
)
"""Kinds of a layer's rows, with what follows the layer's name."""


def rows(layers: int, seed: int, own: Sequence[tuple[str, str]] = ROWS) -> pa.Table:
    """One step of one rank, some rows of each layer."""
    rng = np.random.default_rng(seed)
    n, kinds = layers * len(own), np.tile([kind for kind, _ in own], layers)
    counts = np.zeros((n, BINS), np.int64)
    low = 90 - rng.integers(0, 20, n)
    for i in range(OCCUPIED):
        counts[np.arange(n), low + i] = rng.integers(1, 5000, n)
    scale = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=float))
    none = np.zeros(n, np.int64)
    # Each step's largest gradient differs, as in a training.
    top = np.exp2(low + float(OCCUPIED) + MIN_EXPONENT) * rng.uniform(0.6, 1.0, n)
    stack = ExponentHistogram(
        *(MIN_EXPONENT, counts, counts * scale * 1.4, none, none, none, none, none, top),
        np.exp2(low + 0.5 + MIN_EXPONENT),
    )
    labels = dict.fromkeys(("step", "micro", "rank"), none)
    labels |= {
        "tensors": none + 1,
        "scale": none + 1.0,
        "skipped": none > 0,
        "kind": kinds.tolist(),
    }
    labels |= {"name": [f"layers.{i}{end}" for i in range(layers) for _, end in own]}
    labels |= {
        name: ["float32" if name == "dtype" else "local"] * n
        for name in ("dtype", "placement", "stage")
    }
    return encode(stack, labels, _updates(rng, np.flatnonzero(kinds == "update"), counts.sum(1)))


def _updates(
    rng: np.random.Generator, at: NDArray[np.int64], numel: NDArray[np.int64]
) -> UpdateStack:
    facts = np.stack([numel[at] // share for share in (1, 7, 3, 9, 50)], axis=1)
    return UpdateStack(at, facts, 0, rng.integers(1, 400, (at.size, 7)))


def write(
    folder: Path, layers: int, steps: int, ranks: int, own: Sequence[tuple[str, str]] = ROWS
) -> int:
    """A run of generated rows, 20,000 or a step in each part; returns its rows."""
    part = max(1, 20_000 // (layers * len(own)))
    for rank in range(ranks):
        writer = RunWriter(folder, rank=rank, world_size=ranks)
        meta = {"state": "complete", "steps_recorded": steps, "world_size": ranks}
        writer.write_meta({**meta, "steps_seen": steps})
        writer.write_modules([])
        patterns = [rows(layers, rank * PATTERNS + i, own) for i in range(PATTERNS)]
        for begin in range(0, steps, part):
            pieces = [
                _renumbered(patterns[step % PATTERNS], step, rank)
                for step in range(begin, min(begin + part, steps))
            ]
            writer.append(pa.concat_tables(pieces).unify_dictionaries())
    return layers * len(own) * steps * ranks


def _renumbered(table: pa.Table, step: int, rank: int) -> pa.Table:
    for name, value in (("step", step), ("rank", rank)):
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        column = pa.array(np.full(len(table), value), field.type)
        table = table.set_column(at, field, column)
    return table


def measure(folder: str, stream_from: int | None = None) -> tuple[float, float]:
    """Processor seconds and peak memory in MB of a fresh process that analyzes a run."""
    limit = "" if stream_from is None else f"run_statistics.STREAM_FROM = {stream_from};"
    code = (
        "import sys, time; from mpdiag.analysis import run_statistics;"
        f"{limit} from mpdiag.analysis.analyzer import analyze;"
        "start = time.process_time(); analyze(sys.argv[1]).to_json();"
        "print(time.process_time() - start); print(open('/proc/self/status').read())"
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
    for name, default in (("layers", 2000), ("steps", 397), ("ranks", 1)):
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
    print(f"analyzed in {seconds:.1f} s with a peak of {peak:,.0f} MB")


if __name__ == "__main__":
    main()
