"""How long the dashboard takes: first view of a run, and each interaction afterwards.

    python benchmarks/dashboard.py [--layers 500] [--steps 500] [--json FILE]

On the largest sample run, and on a recording of layers × steps made for it (activation gradients,
weight gradients and updates of each layer at each step). Seconds on the clock and, in brackets, of
processors, which other programs do not lengthen. The browser's time is not included; see
benchmarks/dashboard_browser.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

from mpdiag.installation.bundled import app_folder, sample_runs
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.schema import UpdateStack, encode
from mpdiag.runs.writer import RunWriter

VIEWS = (
    *("overview", "runs", "verdict", "gradients", "layers", "updates", "operations", "training"),
    "compare",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=500)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    print(f"{'seconds':>40}  {'first':>13}  {'again':>13}")
    title = f"{options.layers} layers × {options.steps} steps"
    found = {"sample run ssd": measure("sample run ssd", sample_runs(), "ssd")}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "large", options.layers, options.steps)
        found[title] = measure(title, Path(folder), "large")
    memory = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"memory, at most: {memory} MB")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        told = {"date": str(date.today()), **machine, "load": round(os.getloadavg()[0], 1)}
        document = {"machine": told, "columns": ["clock_s", "processor_s"], **found}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(title: str, folder: Path, run: str) -> dict[str, tuple[float, float]]:
    """Seconds on the clock and of processors for each view, first and again, and for the slider."""
    from streamlit.testing.v1 import AppTest

    os.environ["MPDIAG_RUNS"] = str(folder)
    test = AppTest.from_file(str(app_folder() / "main.py"), default_timeout=600)
    test.query_params["run"] = run
    print(title)
    found = {}
    for view in VIEWS:
        first = timed(lambda view=view: test.switch_page(f"views/{view}.py").run())
        again = timed(test.run)
        print(f"{view:>40}  {_seconds(first)}  {_seconds(again)}")
        found |= {f"{view}, first": first, f"{view}, again": again}
        if view == "gradients":
            moved = timed(lambda: test.slider(key="scale").set_value(3).run())
            print(f"{'gradients, slider moved':>40}  {_seconds(moved)}")
            found["gradients, slider moved"] = moved
        assert not test.exception, test.exception
    return found


def _seconds(took: tuple[float, float]) -> str:
    return f"{took[0]:5.2f} ({took[1]:5.2f})"


def timed(call: object) -> tuple[float, float]:
    """Seconds on the clock, and of processors."""
    began, used = time.perf_counter(), time.process_time()
    call()  # type: ignore[operator]
    return round(time.perf_counter() - began, 3), round(time.process_time() - used, 3)


def write(folder: Path, layers: int, steps: int) -> None:
    """A recording in which each row's values lie about a power of two of their own."""
    generator = np.random.default_rng(0)
    writer = RunWriter(folder)
    names = [f"blocks.{i // 10}.layers.{i % 10}.projection" for i in range(layers)]
    kinds = ("activation_grad", "weight_grad", "update")
    labels = {"kind": np.repeat(kinds, layers), "name": names * 3}
    rows = 3 * layers
    plain = {
        "micro": [-1] * rows,
        "rank": [0] * rows,
        "tensors": [1] * rows,
        "dtype": ["float32"] * rows,
        "placement": ["local"] * rows,
        "stage": ["local"] * rows,
        "scale": [1.0] * rows,
        "skipped": [False] * rows,
    }
    bell = np.exp(-(((np.arange(40) - 20) / 7) ** 2))
    for step in range(steps):
        counts = generator.poisson(1000 * bell, (rows, 40))
        exponents = np.arange(-45, -5, dtype=float)
        none = np.zeros(rows, np.int64)
        h = ExponentHistogram(
            first=-45,
            counts=counts,
            sums=counts * 1.4 * np.exp2(exponents),
            **dict.fromkeys(("zeros", "subnormals", "infs", "nans", "fp16_overflow"), none),
            absmax=np.full(rows, 2.0**-5),
            absmin=np.full(rows, 1.1 * 2.0**-45),
        )
        ratios = generator.poisson(500 * bell, (layers, 40))
        changed = ratios.sum(1)
        facts = np.stack([changed, changed // 9, changed // 2, changed // 50, 0 * changed], 1)
        updates = UpdateStack(np.arange(2 * layers, rows), facts, -5, ratios)
        writer.append(encode(h, {**labels, **plain, "step": [step] * rows}, updates))
    writer.write_modules([{"name": n, "what": "module", "type": "Linear"} for n in names])
    writer.write_meta(
        {
            "state": "complete",
            "created": "2026-01-01T00:00:00+00:00",
            "model": {"type": "Large", "parameters": 1000 * layers},
            "steps_seen": steps,
            "steps_recorded": steps,
        }
    )


if __name__ == "__main__":
    main()
