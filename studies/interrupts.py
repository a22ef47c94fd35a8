"""Ctrl-C at random moments of processes that have loaded no counting kernel yet: is any lost?

    python studies/interrupts.py                        # 500 forked processes
    python studies/interrupts.py --started 20           # and 20 that Python itself starts
    python studies/interrupts.py --json studies/results/interrupts-cpu.json

A recording loads machine code in its first moments. What loads it calls Python back from C, where an
exception is printed and dropped, and the training would go on. Here each training is interrupted once:
half of them at a moment between their start and their tenth step, the others in the first 10 ms after
machine code begins to load, for the first time, the second … An interrupt is lost if the training has
not ended 30 s later. Forked processes come from one that has imported everything and counted nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from faults import Promise, Steps, fork, show, train, wait_for
from numba.core.codegen import JitEngine

from mpdiag.files.atomic import write_json
from mpdiag.recording.counting import host
from mpdiag.runs import provenance
from mpdiag.runs.run import open_run

PATIENCE = 30.0
"""Seconds after which a training that goes on has lost its interrupt."""
SCRIPT = """
import torch
print("begun", flush=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
"""


def ends(child: int) -> int | None:
    """A process's exit code; None if it had to be killed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def say(folder: Path) -> str:
    """What a run says of its end; nothing where it had not begun."""
    return open_run(folder).meta["state"] if (folder / "meta.json").exists() else "interrupted"


def watched(folder: Path, steps: int, done: Steps, loads: Steps) -> None:
    """Train, recorded; ``loads`` says how often machine code has begun to be loaded."""
    plain = JitEngine.finalize_object

    def finalize(engine: Any) -> None:
        loads.set(loads.get() + 1)
        plain(engine)

    JitEngine.finalize_object = finalize
    train(folder, steps, done)


def forked(place: Path, number: int, rng: random.Random) -> list[Promise]:
    """Interrupt trainings of forked processes."""
    ended = Promise("Ctrl-C while a cold process begins: the program gets its KeyboardInterrupt")
    said = Promise("Ctrl-C while a cold process begins: the run says that it was interrupted")
    done, loads, began = Steps(), Steps(), time.monotonic()
    child = fork(lambda: watched(place / "measured", 10, done, loads))
    wait_for(done, 10)
    span, most = time.monotonic() - began, loads.get()
    os.waitpid(child, 0)
    for i in range(number):
        folder, done, loads = place / f"forked{i}", Steps(), Steps()
        child = fork(lambda f=folder, d=done, n=loads: watched(f, 10**9, d, n))  # type: ignore[misc]
        if i % 2:
            moment = "while machine code is loaded"
            wait_for(loads, rng.randint(1, most))
            time.sleep(rng.uniform(0.0, 0.01))
        else:
            moment = "at any moment"
            time.sleep(rng.uniform(0.0, span))
        os.kill(child, signal.SIGINT)
        code = ends(child)
        ended.count(moment)
        ended.check(code in (130, -signal.SIGINT), f"exit code {code}, {moment}")
        said.check(say(folder) == "interrupted", f"{say(folder)}, {moment}")
    return [ended, said]


def started(place: Path, number: int, rng: random.Random) -> Promise:
    """Interrupt trainings under ``mpdiag record`` that Python starts; torch is imported by then."""
    ended = Promise("Ctrl-C while `mpdiag record` begins: it ends with 130")
    script = place / "script.py"
    script.write_text(SCRIPT)
    for i in range(number):
        command = [sys.executable, "-m", "mpdiag", "record", "--out", str(place / f"started{i}")]
        process = subprocess.Popen(
            [*command, "--", str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 3.0))
        process.send_signal(signal.SIGINT)
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        ended.check(code == 130, f"exit code {code}")
    return ended


def main(words: Iterable[str] | None = None) -> int:
    """Run it; 1 if an interrupt was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forked", type=int, default=500)
    parser.add_argument("--started", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="store the figures here")
    options = parser.parse_args(None if words is None else list(words))
    torch.set_num_threads(1)
    rng = random.Random(options.seed)  # noqa: S311
    print(f"{'tried':>7}{'broken':>8}  promise")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        fork_first(place)
        promises = forked(place, options.forked, rng)
        if options.started:
            promises.append(started(place, options.started, rng))
    for promise in promises:
        show(promise)
    if options.json is not None:
        document = {
            "versions": provenance.versions(),
            "seed": options.seed,
            "promises": [{**vars(p), "problems": p.problems[:5]} for p in promises],
        }
        write_json(options.json, document)
    return int(any(promise.broken for promise in promises))


def fork_first(place: Path) -> None:
    """Keep compiled kernels on the disk, in a child: this process must stay without them."""
    os.waitpid(fork(lambda: (host.prepare(), train(place / "first", 2))), 0)


if __name__ == "__main__":
    sys.exit(main())
