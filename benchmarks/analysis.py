"""How long analyzing takes as runs grow: 500 layers × 3 kinds × 50 to 200 steps, on generated rows.

    python benchmarks/analysis.py [--cold RUN | --shapes]

Prints seconds as a ratio to reading the same Parquet with pandas, and the peak of the memory of a
fresh process that does nothing else, its imports included. With ``--cold``, how long ``mpdiag analyze
RUN`` takes as a whole process instead: medians of nine, by the clock and of the processor. With
``--shapes``, how long the advice on shapes takes for models of 250 to 2,000 layers.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from larger_than_memory import measure, write

LAYERS = 500
ROWS = tuple((kind, "") for kind in ("activation", "activation_grad", "weight_grad"))


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
    import pandas as pd

    print(f"{'rows':>9} {'seconds':>8} {'over pandas':>12} {'peak MB':>8} {'bytes/row':>10}")
    for steps in (50, 100, 200):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            rows = write(folder, LAYERS, steps, ranks=1, own=ROWS)
            size = sum(p.stat().st_size for p in (folder / "stats").iterdir())
            start = time.perf_counter()
            pd.read_parquet(folder / "stats")
            reading = time.perf_counter() - start
            taken, peak = measure(str(folder))
        print(
            f"{rows:9,} {taken:8.2f} {taken / reading:12.2f} {peak:8.0f} {size / rows:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
