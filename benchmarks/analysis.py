"""How long analyzing takes as runs grow: 500 layers × 3 kinds × 50 to 200 steps, on generated rows.

    python benchmarks/analysis.py [--cold RUN | --shapes]

Prints seconds as a ratio to reading the same Parquet with pandas, and the peak of the memory of a
fresh process that does nothing else, its imports included. With ``--cold``, how long ``mpdiag analyze
RUN`` takes as a whole process instead: medians of nine, by the clock and of the processor. With
``--shapes``, how long the advice on shapes takes for models of 250 to 2,000 layers.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mpdiag.analysis.analyzer import analyze
from mpdiag.numerics.histograms import BINS, MIN_EXPONENT, ExponentHistogram
from mpdiag.runs.schema import encode
from mpdiag.runs.writer import RunWriter

LAYERS = 500
KINDS = ("activation", "activation_grad", "weight_grad")


def write(folder: Path, steps: int) -> int:
    """A run of generated histograms; returns its rows."""
    rng = np.random.default_rng(0)
    writer = RunWriter(folder)
    writer.write_meta({"state": "complete", "steps_recorded": steps})
    writer.write_modules([])
    for begin in range(0, steps, 10):
        n = 10 * LAYERS * len(KINDS)
        counts = np.zeros((n, BINS), np.int64)
        low = 90 - rng.integers(0, 20, n)
        for i in range(25):
            counts[np.arange(n), low + i] = rng.integers(1, 5000, n)
        scale = np.exp2(np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=float))
        none = np.zeros(n, np.int64)
        top = np.exp2(low + 25.0 + MIN_EXPONENT)
        stack = ExponentHistogram(
            *(MIN_EXPONENT, counts, counts * scale * 1.4, none, none, none, none, none, top),
            np.exp2(low + 0.5 + MIN_EXPONENT),
        )
        labels = {
            "step": np.repeat(np.arange(begin, begin + 10), LAYERS * len(KINDS)),
            "kind": np.tile(np.repeat(KINDS, LAYERS), 10).tolist(),
            "name": [f"layers.{i}" for i in range(LAYERS)] * (10 * len(KINDS)),
            "micro": none,
            "rank": none,
            "tensors": none + 1,
            "scale": none + 1.0,
            "skipped": none > 0,
        }
        labels |= {
            name: ["float32" if name == "dtype" else "local"] * n
            for name in ("dtype", "placement", "stage")
        }
        writer.append(encode(stack, labels))
    return steps * LAYERS * len(KINDS)


def measure(folder: str) -> None:
    """Analyze in this process and print seconds and peak memory in MB."""
    start = time.perf_counter()
    analyze(folder).to_json()
    taken = time.perf_counter() - start
    # Not getrusage: its maximum comes down from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(taken, int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)


def cold(run: str, times: int = 9) -> tuple[float, float]:
    """Seconds of ``mpdiag analyze`` as a whole process: medians by the clock, and of the processor."""
    command = [sys.executable, "-m", "mpdiag", "analyze", run, "--json"]
    wall, processor = [], []
    for _ in range(times):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(wall), statistics.median(processor)


def shapes() -> None:
    """Print seconds of the advice on shapes, and the ratio to the model of half as many layers."""
    import torch

    import mpdiag
    from mpdiag.analysis.shapes.advice import advise_shapes
    from mpdiag.analysis.shapes.solution import Wanted

    class Layers(torch.nn.Module):
        def __init__(self, count: int, *, residual: bool) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(30, 30) for _ in range(count))
            self.residual = residual

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) if self.residual else layer(x)
            return x

    print(f"{'model':>16} {'layers':>7} {'seconds':>8} {'ratio':>6}")
    for residual in (False, True):
        before = None
        for count in (250, 500, 1000, 2000):
            model = Layers(count, residual=residual)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with tempfile.TemporaryDirectory() as folder:
                with mpdiag.record(model, optimizer, Path(folder) / "run"):
                    model(torch.randn(4, 30)).square().mean().backward()
                    optimizer.step()
                run = mpdiag.open_run(Path(folder) / "run")
                run.operations()
                start = time.process_time()
                advise_shapes(run, Wanted("fp16"))
                taken = time.process_time() - start
            name = "residual stream" if residual else "chain"
            ratio = f"{taken / before:6.1f}" if before else ""
            print(f"{name:>16} {count:7,} {taken:8.2f} {ratio}", flush=True)
            before = taken


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--shapes"]:
        shapes()
        return
    if sys.argv[1:2] == ["--cold"]:
        print("{:.2f} s, of the processor {:.2f} s".format(*cold(sys.argv[2])))
        return
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    import pandas as pd

    print(f"{'rows':>9} {'seconds':>8} {'over pandas':>12} {'peak MB':>8} {'bytes/row':>10}")
    for steps in (50, 100, 200):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            rows = write(folder, steps)
            size = sum(p.stat().st_size for p in (folder / "stats").iterdir())
            start = time.perf_counter()
            pd.read_parquet(folder / "stats")
            reading = time.perf_counter() - start
            command = [sys.executable, __file__, str(folder)]
            child = subprocess.run(command, capture_output=True, text=True, check=True)
            taken, peak = map(float, child.stdout.split())
        print(
            f"{rows:9,} {taken:8.2f} {taken / reading:12.2f} {peak:8.0f} {size / rows:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
