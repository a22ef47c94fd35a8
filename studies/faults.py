"""What happens to a training that is recorded, in real processes: kills, interrupts, damage.

    python studies/faults.py                     # 200 kills, 60 interrupts: some minutes
    python studies/faults.py --quick             # a handful of each
    python studies/faults.py --kills 1000 --json studies/results/faults-cpu.json
    python studies/faults.py --only interrupts --json FILE   # the other figures in FILE stay

Each line is a promise, with how often it was tried and how often it was broken:

- a training that is killed at any moment leaves a run that opens, whose parts are whole, and that
  lacks at most what one flush holds;
- a file cut off anywhere is refused with one sentence, and the rest of the run can be read without it;
- whatever fails inside the recorder, the training ends with the weights it has without a recorder.

Processes are forked from one that has loaded torch, so that hundreds take a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import mpdiag
from mpdiag.errors import InputError, RunExists
from mpdiag.recording import ledger
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.lifecycle import finish_at_exit
from mpdiag.recording.recorder import Recorder
from mpdiag.recording.run_folder import RunFolder
from mpdiag.runs.run import open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROWS = 3 * 2 + 4 * 3 + 2
"""Rows of a step: activations of 4 modules, gradients of 3, three kinds for 4 parameters, and more."""
STEPS = 12


@dataclass
class Promise:
    """One line of the table.

    Attributes:
        name: What is promised.
        tried, broken: How often.
        notes: Figures beside it.
        problems: What was wrong, the first few.
    """

    name: str
    tried: int = 0
    broken: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def check(self, good: bool, problem: str) -> None:
        """Note one trial."""
        self.tried += 1
        if not good:
            self.broken += 1
            self.problems.append(problem)

    def count(self, name: str, by: int = 1) -> None:
        self.notes[name] = self.notes.get(name, 0) + by


# -- the training ----------------------------------------------------------------------------------


class Steps:
    """The number of steps that a training has ended, shared with its parent."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def set(self, step: int) -> None:
        self._memory[:8] = struct.pack("q", step)

    def get(self) -> int:
        return int(struct.unpack("q", self._memory[:8])[0])


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(folder: Path | None, steps: int, done: Steps | None = None, flush_steps: int = 1) -> str:
    """Train, recorded or not; returns a digest of the weights."""
    ledger._FLUSH_ROWS = flush_steps * ROWS  # a flush is due when so many rows wait
    model, optimizer = model_and_optimizer()
    recorder: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if folder is not None:
        recorder = mpdiag.record(model, optimizer, folder, every=1)
    with recorder:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            if done is not None:
                done.set(step + 1)
    return digest(model)


def digest(model: nn.Module) -> str:
    parts = (p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def fork(work: Callable[[], object]) -> int:
    """Run a function in a child process: exit code 0 when it returns, 130 after Ctrl-C, 1 otherwise."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
        sys.last_type = KeyboardInterrupt  # as the interpreter notes what ends a program
    except BaseException:  # noqa: BLE001 - it must not return into the parent's program
        traceback.print_exc()
    finally:
        try:  # whatever falls into it, a child must not return into the parent's program
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            finish_at_exit()
        finally:
            os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(done: Steps, step: int) -> None:
    """Wait until a training has ended so many steps, a minute at most."""
    deadline = time.monotonic() + 60
    while done.get() < step and time.monotonic() < deadline:
        time.sleep(0.001)


def in_child(work: Callable[[], str]) -> tuple[int, str]:
    """A process's exit code, and what it returned."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        code = ended(fork(lambda: path.write_text(work())))
        return code, path.read_text()


def whole_steps(folder: Path) -> int:
    """The number of recorded steps, each with all its rows, from 0 on without a gap; 0 if none."""
    run = open_run(folder)
    if not run.parts():
        return 0
    steps, rows = np.unique(run.records.step, return_counts=True)
    if steps.tolist() != list(range(len(steps))) or set(rows[1:]) - {ROWS}:
        message = f"steps {steps.tolist()} with {rows.tolist()} rows"
        raise AssertionError(message)
    return len(steps)


def attempt(promise: Promise, work: Callable[[], None]) -> None:
    """Note a trial; any exception breaks the promise."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - a broken promise is the result
        promise.check(False, f"{type(error).__name__}: {error}"[:300])
    else:
        promise.check(True, "")


# -- kills and interrupts --------------------------------------------------------------------------


def kills(place: Path, number: int, rng: random.Random) -> list[Promise]:
    """SIGKILL at random moments, with a flush after every step or every fifth."""
    opens = Promise("killed at a random moment: the run opens, parts and steps are whole")
    lost = Promise("killed: at most what one flush holds is lost")
    analyzed = Promise("killed: what was recorded can be analyzed")
    worst = 0
    for i in range(number):
        folder, done, flush = place / f"killed{i}", Steps(), rng.choice((1, 5))
        child = fork(lambda f=folder, d=done, n=flush: train(f, 10**6, d, n))  # type: ignore[misc]
        if rng.random() < 0.9:  # else it dies while it is still opening the run
            wait_for(done, rng.randint(0, 12))
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        ended(child)
        if not (folder / "meta.json").is_file():
            opens.count("killed before the recording began")
            opens.check(done.get() == 0, "steps were recorded into a folder without meta.json")
            continue
        found = 0

        def look(folder: Path = folder) -> None:
            nonlocal found
            found = whole_steps(folder)

        attempt(opens, look)
        # The first step is a part of its own; after it, a step belongs to the next flush.
        missing = max(0, done.get() - found)
        worst = max(worst, missing)
        lost.check(missing <= flush, f"{done.get()} steps ended, {found} on disk, flush {flush}")
        opens.count("steps recorded before the kills", found)
        if found:
            attempt(analyzed, lambda f=folder: mpdiag.analyze(f))  # type: ignore[misc]
        opens.count("unfinished files left beside", len(list(folder.rglob(".*.part"))))
        shutil.rmtree(folder)
    lost.notes["most steps lost"] = worst
    return [opens, lost, analyzed]


def interrupts(place: Path, number: int, rng: random.Random) -> list[Promise]:
    """Ctrl-C at random moments, half of the time twice in quick succession."""
    ends = Promise("Ctrl-C at a random moment: the program gets its KeyboardInterrupt")
    whole = Promise("Ctrl-C: the run opens, parts and steps are whole")
    said = Promise("Ctrl-C, once or twice: the run says that it was interrupted")
    for i in range(number):
        folder, done = place / f"interrupted{i}", Steps()
        child = fork(lambda f=folder, d=done: train(f, 10**6, d))  # type: ignore[misc]
        wait_for(done, rng.randint(1, 15))
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGINT)
        if rng.random() < 0.5:
            said.count("pressed twice")
            time.sleep(rng.uniform(0.0, 0.02))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
        code, again = None, 0
        while code is None:  # a library that swallows one, as a person would see: press again
            time.sleep(0.02)
            finished, status = os.waitpid(child, os.WNOHANG)
            again += 1
            if finished:
                code = os.waitstatus_to_exitcode(status)
            elif again % 250 == 0:
                ends.count("pressed again")
                os.kill(child, signal.SIGINT)
        ends.check(code in (130, -signal.SIGINT), f"exit code {code}")
        attempt(whole, lambda f=folder: whole_steps(f))  # type: ignore[misc]
        state = open_run(folder).meta["state"]
        said.check(state == "interrupted", f"state {state}")
        shutil.rmtree(folder)
    return [ends, whole, said]


# -- damage ----------------------------------------------------------------------------------------


def truncations(place: Path, every: int) -> list[Promise]:
    """Each file of a run, cut off at offsets of every kind."""
    refused = Promise("a file cut off anywhere: read, or refused with one sentence of ours")
    rest = Promise("a part cut off: without it, the rest can be read")
    run = place / "whole"
    code, _ = in_child(lambda: train(run, 4))
    assert code == 0
    mpdiag.analyze(run).plan.save(run / "plan.json")
    (run / "training.jsonl").write_text('{"step": 0, "loss": 1.5, "scale": 1.0}\n' * 3)
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        content = path.read_bytes()
        size = len(content)
        offsets = {
            0,
            1,
            3,
            4,
            5,
            8,
            12,
            size // 2,
            size - 9,
            size - 8,
            size - 5,
            size - 4,
            size - 1,
        }
        offsets |= set(range(0, size, max(1, size // every)))
        for offset in sorted(o for o in offsets if 0 <= o < size):
            path.write_bytes(content[:offset])
            attempt(refused, lambda: _read_all(run, refused))
        path.unlink()
        if path.parent.name == "stats":
            attempt(rest, lambda: open_run(run).records and None)
        path.write_bytes(content)
    return [refused, rest]


def _read_all(run: Path, promise: Promise) -> None:
    from mpdiag.plan import PrecisionPlan
    from mpdiag.runs.training_log import read_log

    def modules() -> object:
        return open_run(run).modules()

    def plan() -> object:
        return PrecisionPlan.load(run / "plan.json")

    readers: list[Callable[[], object]] = [
        lambda: open_run(run).records, modules, plan, lambda: read_log(run),
    ]  # fmt: skip
    for read in readers:
        try:
            read()
            promise.count("read")
        except InputError as error:
            promise.count("refused")
            if "\n" in str(error) or not str(error):
                raise AssertionError(repr(str(error))) from error


# -- others at the same folder ---------------------------------------------------------------------


def rivals(place: Path, number: int) -> list[Promise]:
    """Two processes that begin to record into one folder at once."""
    one = Promise("two processes at one new folder: one records, the other is told")
    for i in range(number):
        folder, results = place / f"rivals{i}", (place / f"a{i}", place / f"b{i}")
        start = time.monotonic() + 0.1

        def work(result: Path, folder: Path = folder, start: float = start) -> None:
            while time.monotonic() < start:
                pass
            try:
                train(folder, 3)
            except RunExists:
                result.write_text("told")
            else:
                result.write_text("recorded")

        children = [fork(lambda r=r: work(r)) for r in results]  # type: ignore[misc]
        codes = [ended(child) for child in children]

        def look(folder: Path = folder, results: Any = results, codes: Any = codes) -> None:
            outcome = sorted(r.read_text() for r in results)
            assert codes == [0, 0], codes
            assert outcome == ["recorded", "told"], outcome
            assert whole_steps(folder) == 3

        attempt(one, look)
    return [one]


def readers(place: Path, seconds: float) -> list[Promise]:
    """A reader that opens a run again and again while it is written."""
    sees = Promise("a reader while writing: whole steps, and never fewer than before")
    folder, done = place / "read", Steps()
    child = fork(lambda: train(folder, 10**6, done))
    while not done.get():
        time.sleep(0.01)
    before, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        least = done.get()

        def look(least: int = least) -> None:
            nonlocal before
            found = whole_steps(folder)
            assert found >= max(before, least), f"{found} steps, {least} were on disk"
            before = found

        attempt(sees, look)
    os.kill(child, signal.SIGKILL)
    ended(child)
    sees.notes["steps written meanwhile"] = before
    return [sees]


def ranks(place: Path, number: int, rng: random.Random) -> list[Promise]:
    """Three ranks of one run; one of them dies."""
    stays = Promise("a rank that dies: the other ranks' rows are all there")
    for i in range(number):
        folder = place / f"ranks{i}"

        def work(rank: int, folder: Path = folder) -> None:
            os.environ.update(RANK=str(rank), WORLD_SIZE="3")
            train(folder, 10**6 if rank == 1 else STEPS)

        children = [fork(lambda r=r: work(r)) for r in range(3)]  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.8))
        os.kill(children[1], signal.SIGKILL)
        codes = [ended(child) for child in children]

        def look(folder: Path = folder, codes: Any = codes) -> None:
            assert codes == [0, -signal.SIGKILL, 0], codes
            records = open_run(folder).records
            for rank in (0, 2):
                steps = np.unique(records.step[records.rank == rank])
                assert steps.tolist() == list(range(STEPS)), f"rank {rank}: {steps.tolist()}"
            mpdiag.analyze(folder)

        attempt(stays, look)
    return [stays]


# -- trouble inside --------------------------------------------------------------------------------


def trouble(place: Path, number: int, rng: random.Random) -> list[Promise]:
    """Errors raised inside the recorder, and clocks that run backwards."""
    _, plain = in_child(lambda: train(None, STEPS))
    assert len(plain) == 64
    promises = []
    faults: dict[str, Callable[[random.Random], None]] = {
        "a hook that raises": lambda rng: _raise_in(Ledger, "count", ZeroDivisionError, rng),
        "out of memory in a hook": lambda rng: _raise_in(Ledger, "count", MemoryError, rng),
        "no device memory in a hook": lambda rng: _raise_in(
            Ledger, "note_updates", torch.OutOfMemoryError, rng
        ),
        "a disk that fails": lambda rng: _raise_in(Ledger, "flush", OSError, rng),
        "an error at the end of a step": lambda rng: _raise_in(Ledger, "drain", KeyError, rng),
        "an error in meta.json": lambda rng: _raise_in(RunFolder, "write_meta", TypeError, rng),
        "clocks that run backwards": _turn_back_clocks,
    }
    for name, fault in faults.items():
        same = Promise(f"{name}: the training ends with the same weights, the run is whole")
        for i in range(number):
            folder, seed = place / f"{name}{i}", rng.random()

            def work(folder: Path = folder, fault: Any = fault, seed: float = seed) -> str:
                warnings.simplefilter("ignore")
                fault(random.Random(seed))  # noqa: S311
                return train(folder, STEPS)

            code, weights = in_child(work)

            def look(folder: Path = folder, code: int = code, weights: str = weights) -> None:
                assert code == 0, f"exit code {code}"
                assert weights == plain, "other weights"
                if (folder / "meta.json").is_file():
                    _steps_without_gaps_in_rows(folder)

            attempt(same, look)
        promises.append(same)
    return promises


def _steps_without_gaps_in_rows(folder: Path) -> None:
    """After a failure the rows of its step may be missing, but no other step's."""
    run = open_run(folder)
    if run.parts():
        _, rows = np.unique(run.records.step, return_counts=True)
        assert (rows[1:] != ROWS).sum() <= 1, rows.tolist()


def _raise_in(owner: Any, name: str, error: type[BaseException], rng: random.Random) -> None:
    """The n-th call of a method raises, once."""
    method, at = getattr(owner, name), rng.randint(1, 2 * STEPS)
    calls = 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            message = "made to fail"
            raise error(message)
        return method(self, *args, **kwargs)

    setattr(owner, name, failing)


def _turn_back_clocks(rng: random.Random) -> None:
    """Every clock jumps, forwards and backwards."""
    for name in ("time", "monotonic", "perf_counter"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() + rng.uniform(-1e6, 1e6))
    from mpdiag.recording import cadence, run_folder
    from mpdiag.runs import run

    run.now = lambda: f"20{rng.randint(10, 99)}-01-01T00:00:00.000+00:00"  # type: ignore[assignment]
    run_folder.now = run.now
    cadence.Governor.__init__.__defaults__ = (time.perf_counter,)  # type: ignore[attr-defined]
    Recorder.__init__.__kwdefaults__["clock"] = time.perf_counter  # type: ignore[index]


def show(promise: Promise) -> None:
    """A line of the table."""
    notes = "; ".join(f"{k}: {v}" for k, v in promise.notes.items())
    words = f"{promise.name}{f' ({notes})' if notes else ''}"
    print(f"{promise.tried:7}{promise.broken:8}  {words}")
    for problem in promise.problems[:3]:
        print(f"{'':17}{problem}")
    sys.stdout.flush()


# -- the table -------------------------------------------------------------------------------------


def main(words: Iterable[str] | None = None) -> int:
    """Run it; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--interrupts", type=int, default=60)
    parser.add_argument("--others", type=int, default=20, help="trials of every other fault")
    parser.add_argument("--cuts", type=int, default=60, help="offsets in each file, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a handful of each")
    parser.add_argument("--only", help="groups, with commas between: kills,interrupts …")
    parser.add_argument("--json", type=Path, help="store the figures here")
    options = parser.parse_args(None if words is None else list(words))
    if options.quick:
        options.kills, options.interrupts, options.others, options.cuts = 6, 4, 1, 4
    torch.set_num_threads(1)
    with torch.no_grad():  # compile the counters once, for every child
        ledger.rows_on(torch.device("cpu")).count(torch.ones(3), 1, 0)
    rng = random.Random(options.seed)  # noqa: S311
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        train(place / "first", 2)  # imports everything once, for every child
        print(f"{'tried':>7}{'broken':>8}  promise")
        groups: dict[str, Callable[[], list[Promise]]] = {
            "kills": lambda: kills(place, options.kills, rng),
            "interrupts": lambda: interrupts(place, options.interrupts, rng),
            "truncations": lambda: truncations(place, options.cuts),
            "rivals": lambda: rivals(place, options.others),
            "readers": lambda: readers(place, options.others / 4),
            "ranks": lambda: ranks(place, options.others, rng),
            "trouble": lambda: trouble(place, options.others, rng),
        }
        promises = []
        for name in options.only.split(",") if options.only else groups:
            for promise in groups[name]():
                promises.append(promise)
                show(promise)
    if options.json is not None:
        from mpdiag.files.atomic import write_json
        from mpdiag.runs import provenance

        figures = {p.name: {**vars(p), "problems": p.problems[:5]} for p in promises}
        if options.only and options.json.is_file():
            kept = json.loads(options.json.read_text())["promises"]
            figures = {p["name"]: p for p in kept} | figures
        document = {
            "seed": options.seed,
            "seconds": round(time.monotonic() - began),
            "versions": provenance.versions(),
            "promises": list(figures.values()),
        }
        write_json(options.json, json.loads(json.dumps(document)))
    return int(any(p.broken for p in promises))


if __name__ == "__main__":
    sys.exit(main())
