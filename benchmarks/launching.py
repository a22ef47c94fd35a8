"""What ``mpdiag record`` costs: a script's time under it over its time under plain ``python``.

    python benchmarks/launching.py [--repeats 5] [--json FILE] [NAME …]

Whole processes, start-up, imports and the writing of the run included. The two take turns, so that a
machine that slows down slows both; each figure is a ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
NAMES = """
    plain_loop trainer_class with_files/train lbfgs_closure accumulation own_grad_scaler
    lightning_script hf_trainer accelerate_script workers
""".split()


def seconds(words: list[str], folder: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    print(f"{'script':<20}{'python':>9}{'recorded':>10}{'ratio':>7}")
    rows = []
    for name in options.names:
        script = str(SCRIPTS / f"{name}.py")
        plain, recorded = [], []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                plain.append(seconds([script], folder))
                record = ["-m", "mpdiag", "record", "--out", "run", "--", script]
                recorded.append(seconds(record, folder))
        a, b = statistics.median(plain), statistics.median(recorded)
        rows.append({"script": name, "python_s": a, "recorded_s": b, "ratio": b / a})
        print(f"{name:<20}{a:>8.2f}s{b:>9.2f}s{b / a:>7.2f}", flush=True)
    middle = statistics.median(row["ratio"] for row in rows)
    print(f"{'median':<39}{middle:>7.2f}")
    if options.json:
        import torch

        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        told = {"date": str(date.today()), **machine, "torch": torch.__version__}
        figures = {"machine": told, "median_ratio": round(middle, 3), "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
