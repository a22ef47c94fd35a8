"""Large things: layers, steps, ranks, traces, hours. Memory must stay flat and cost grow in line.

    python benchmarks/scale.py                       # all at full size: some 20 minutes of one core
    python benchmarks/scale.py --quick               # a twentieth of each, in about a minute
    python benchmarks/scale.py --layers 5000 --only layers --json scale.json
    python benchmarks/scale.py --json scale.json --resume   # what the file lacks

Each row is measured in a process of its own, at a quarter, a half and all of the size:

- layers: a chain of small Linear layers, every step recorded; seconds of recording a step, writing
  and closing included, the most memory the recorder took, and how much of it came after two steps;
- steps: a small model at the default cadence; microseconds that recording adds to a step, over all
  steps, and how much the process grew after the first tenth of the training, and in its second half;
- ranks: processes that record into one folder; seconds to read and analyze it;
- trace: MB of a torch.profiler trace; seconds to read it;
- hours: a training of so many hours on a clock that runs ahead, with parts written every 30 seconds
  of it; how much the process grew, and the size of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FULL = {"layers": 5_000, "steps": 100_000, "ranks": 64, "trace": 2_000, "hours": 2.0}
LAYER_STEPS = 6
STEP_SECONDS = 0.1
"""Of the training whose hours are compressed."""
MB = 1 << 20


def status(name: str) -> float:
    """A line of the kernel's account of this process, MB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def folder_mb(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / MB


def small() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def stepper(model: Any, batch: Any) -> tuple[Any, Callable[[], None]]:
    """An optimizer, and a function that takes a step."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return optimizer, step


# -- what is measured, each in a process of its own ------------------------------------------------


def layers(size: float, place: Path) -> dict[str, float]:
    """Recording a step of a model of so many layers, all of it: counting, writing, closing."""
    import torch
    from torch import nn

    import mpdiag

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(int(size))))
    optimizer, step = stepper(model, torch.randn(4, 8))
    step()
    plain = seconds_of(step, LAYER_STEPS)
    first = small()
    first_optimizer, first_step = stepper(first, torch.randn(8, 16))
    with mpdiag.record(first, first_optimizer, place / "first", operations=0):  # imports
        first_step()
    gc.collect()
    without = status("VmHWM")
    with mpdiag.record(model, optimizer, place / "run", every=1, operations=0):
        step()
        step()
        gc.collect()
        before = status("VmRSS")
        taken = seconds_of(step, LAYER_STEPS)
        gc.collect()
        grown = status("VmRSS") - before
        began = time.process_time()
    taken += (time.process_time() - began) / LAYER_STEPS
    return {
        "plain step s": plain,
        "recorded step s": taken,
        "ms a layer": 1000 * (taken - plain) / size,
        "recorder MB": status("VmHWM") - without,
        "grown MB": grown,
        "run MB": folder_mb(place / "run"),
    }


def seconds_of(step: Callable[[], None], count: int) -> float:
    """Processor time of a step, the mean of so many."""
    began = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began) / count


def steps(size: float, place: Path) -> dict[str, float]:
    """What recording adds to a step at the default cadence, and how the process grows."""
    import torch

    import mpdiag

    count = int(size)
    batch = torch.randn(8, 16)
    _, plain_step = stepper(small(), batch)
    seconds_of(plain_step, 200)
    plain = seconds_of(plain_step, count // 10)
    model = small()
    optimizer, step = stepper(model, batch)
    memory = []
    with mpdiag.record(model, optimizer, place / "run") as recorder:
        taken = 0.0
        for _ in range(10):
            taken += seconds_of(step, count // 10) / 10
            gc.collect()
            memory.append(status("VmRSS"))
    return {
        "plain step us": 1e6 * plain,
        "added us": 1e6 * (taken - plain),
        "steps recorded": recorder.steps_recorded,
        "grown MB": memory[-1] - memory[0],
        "second half MB": memory[-1] - memory[4],
        "run MB": folder_mb(place / "run"),
    }


def ranks(size: float, place: Path) -> dict[str, float]:
    """One folder, so many ranks: each a forked process with the environment of torchrun."""
    import torch

    import mpdiag
    from mpdiag.runs.run import open_run

    batch, count = torch.randn(8, 16), int(size)

    def work(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
        model = small()
        optimizer, step = stepper(model, batch)
        with mpdiag.record(model, optimizer, place / "run", operations=0):
            for _ in range(60):
                step()

    model = small()
    optimizer, step = stepper(model, batch)
    with mpdiag.record(model, optimizer, place / "first", operations=0):  # imports and compiles
        step()
    began = time.perf_counter()
    waiting = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank)
                code = 0
            finally:
                os._exit(code)
        waiting.append(child)
        if len(waiting) == 8:  # so many at a time
            assert os.waitpid(waiting.pop(0), 0)[1] == 0
    assert all(os.waitpid(child, 0)[1] == 0 for child in waiting)
    recorded = time.perf_counter() - began
    began = time.perf_counter()
    analysis = mpdiag.analyze(place / "run")
    taken = time.perf_counter() - began
    rows = open_run(place / "run").rows()
    assert analysis.verdict
    return {
        "recording s": recorded,
        "rows": rows,
        "analyze s": taken,
        "us a row": 1e6 * taken / rows,
        "run MB": folder_mb(place / "run"),
    }


def trace(size: float, place: Path) -> dict[str, float]:
    """Reading a trace of so many MB."""
    from traces import MB as TRACE_MB
    from traces import generate, grow

    from mpdiag.tensorcores.trace_analysis import profile_trace

    path = place / "trace.json"
    grow(generate(), path, int(size) * TRACE_MB)
    before, began = status("VmRSS"), time.process_time()
    profile = profile_trace(path)
    taken = time.process_time() - began
    assert profile.kernels
    return {
        "read s": taken,
        "MB/s": path.stat().st_size / TRACE_MB / taken,
        "grown MB": status("VmHWM") - before,
    }


def hours(size: float, place: Path) -> dict[str, float]:
    """A training of so many hours: its steps, on a clock that moves 0.1 s with each of them."""
    import torch

    import mpdiag
    from mpdiag.recording import ledger, recorder
    from mpdiag.runs.run import open_run

    now = time.monotonic()

    class Clock:
        """The module ``time`` with a clock of its own."""

        @staticmethod
        def monotonic() -> float:
            return now

        perf_counter = staticmethod(time.perf_counter)

    ledger.time = recorder.time = Clock  # type: ignore[attr-defined]
    model, count = small(), int(size * 3600 / STEP_SECONDS)
    optimizer, step = stepper(model, torch.randn(8, 16))
    before = 0.0
    began = time.perf_counter()
    with mpdiag.record(model, optimizer, place / "run"):
        for i in range(count):
            now += STEP_SECONDS
            step()
            if i == count // 10:
                gc.collect()
                before = status("VmRSS")
        gc.collect()
        grown = status("VmRSS") - before
    taken = time.perf_counter() - began
    began = time.perf_counter()
    assert mpdiag.analyze(place / "run").verdict
    return {
        "steps": count,
        "parts": len(open_run(place / "run").parts()),
        "wall s": taken,
        "grown MB": grown,
        "run MB": folder_mb(place / "run"),
        "analyze s": time.perf_counter() - began,
    }


MEASURES: dict[str, Callable[[float, Path], dict[str, float]]] = {
    "layers": layers,
    "steps": steps,
    "ranks": ranks,
    "trace": trace,
    "hours": hours,
}


# -- the table -------------------------------------------------------------------------------------


def _child(name: str, size: float, place: str, pipe: Any) -> None:
    with contextlib.redirect_stderr(None):
        pipe.send(MEASURES[name](size, Path(place)))


def measure(name: str, size: float) -> dict[str, float]:
    """A row: one measure at one size, in a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as place:
        child = context.Process(target=_child, args=(name, size, place, theirs))
        child.start()
        theirs.close()
        try:
            found: dict[str, float] = ours.recv()
        except EOFError:
            child.join()
            message = f"{name} of {size:g} failed: its process ended with {child.exitcode}"
            raise SystemExit(message) from None
        child.join()
    return found


def main(words: Iterable[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in FULL.items():
        parser.add_argument(f"--{name}", type=float, default=size)
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--quick", action="store_true", help="a twentieth of each size")
    parser.add_argument("--json", type=Path, help="store the figures here")
    parser.add_argument("--resume", action="store_true", help="measure what the file lacks")
    options = parser.parse_args(None if words is None else list(words))
    wanted = options.only.split(",") if options.only else list(FULL)
    results = _stored(options.json)
    for name in wanted:
        whole = getattr(options, name) / (20 if options.quick else 1)
        known = {row["size"]: row for row in results.get(name, [])} if options.resume else {}
        rows: list[dict[str, float]] = []
        for share in (0.25, 0.5, 1.0):
            size = whole * share if name == "hours" else max(1, round(whole * share))
            row = known.get(size) or {"size": size, **measure(name, size)}
            if not rows:
                print(f"\n{name:>10}" + "".join(f"{k:>16}" for k in row if k != "size"))
            rows.append(row)
            print(
                f"{size:10g}" + "".join(f"{v:16.4g}" for k, v in row.items() if k != "size"),
                flush=True,
            )
            results[name] = rows
            if options.json is not None:
                _store(options.json, results)
    return 0


def _stored(file: Path | None) -> dict[str, list[dict[str, float]]]:
    if file is None or not file.is_file():
        return {}
    results: dict[str, list[dict[str, float]]] = json.loads(file.read_text())["results"]
    return results


def _store(file: Path, results: dict[str, list[dict[str, float]]]) -> None:
    from mpdiag.files.atomic import write_json
    from mpdiag.runs import provenance

    write_json(file, {"versions": provenance.versions(), "results": results})


if __name__ == "__main__":
    sys.exit(main())
