"""Hostile files for every reader: only our own errors, bounded time and memory, no other file.

    python studies/fuzz.py                      # 10,000 inputs for each reader
    python studies/fuzz.py --count 500 --only plan,nsys --json fuzz.json
    python studies/fuzz.py --only plan --again 1234     # one input once more, with its traceback

An input is a real file, corrupted: bits, bytes and lengths; JSON values of other types, huge numbers,
NaN, keys twice, values nested deep; CSV cells and columns; Parquet columns of other types; views in
a database that never end; paths, control characters, HTML and formulas for names. Its number and
``--seed`` name it. A reader may read it or refuse it with one of our errors, in one sentence; the
first inputs, and every ``deep`` one, also go through what is shown of them, and through the command
line, which must exit with 0 or 3. Everything else is a failure and is printed with its number.

Each reader works in a process of its own, whose files are watched by an audit hook: a file outside
its folder that is read or written is a failure, and so is a process or a connection that is opened.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hostile.good_files import record_run
from hostile.mutations import CORRUPTIONS
from hostile.readers import readers

from mpdiag.errors import MpdiagError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostile.readers import Reader

SECONDS = 20.0
"""Time limit for an input; a process that does not answer for three times as long is killed."""
MEMORY = 3 << 30
"""Address space of a process beyond what it has before the first input."""
DEEP_EVERY = 50


# -- one input -------------------------------------------------------------------------------------


class TooSlowError(BaseException):
    """An input takes too long; no reader may catch this."""


def corrupt(reader: Reader, rng: random.Random) -> bytes:
    """One hostile file."""
    return CORRUPTIONS[reader.how](rng.choice(reader.seeds), rng)


def numbered(reader: Reader, seed: int, number: int) -> bytes:
    """The hostile file of a number."""
    return corrupt(reader, random.Random(f"{reader.name}:{seed}:{number}"))  # noqa: S311


def attempt(reader: Reader, folder: Path, data: bytes, *, deep: bool = False) -> str:
    """Give one file to a reader; returns the name of our error, or "read".

    Raises:
        Exception: Whatever is no error of ours, or one that is not one sentence.
    """
    (folder / reader.file).write_bytes(data)
    try:
        (reader.show if deep else reader.read)(folder)
    except MpdiagError as error:
        text = str(error)
        assert text, "an error without a sentence"
        assert len(text) < 1_100, f"an error of {len(text)} characters"
        outcome = type(error).__name__
    else:
        outcome = "read"
    if deep and reader.command:
        _command(reader, folder)
    return outcome


def _command(reader: Reader, folder: Path) -> None:
    from typer.testing import CliRunner

    from mpdiag.cli import app

    words = [str(folder / w) if (folder / w).exists() else w for w in reader.command]
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, [*words, *more])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 2 if reader.name == "plan.json" else 0, 3), (
            f"exit code {result.exit_code}"
        )
        if result.exit_code:
            said = result.stderr.strip().splitlines()
            assert len(said) == 1, f"{len(said)} lines of error"
            assert all(ord(c) >= 32 and not 127 <= ord(c) < 160 for c in said[0]), repr(
                said[0][:200]
            )


def prepare(reader: Reader, folder: Path) -> None:
    """The files beside the corrupted one."""
    if reader.base is not None:
        shutil.copytree(reader.base, folder, dirs_exist_ok=True)


# -- many inputs -----------------------------------------------------------------------------------

_REFUSED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_FILES = ("open", "sqlite3.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir")


class Watch:
    """An audit hook: which files were touched outside the folder."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        here = Path(__file__).resolve().parents[1]
        libraries = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}
        self._allowed = tuple(str(p) for p in (folder, here / "mpdiag", *libraries))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _REFUSED or event == "pickle.find_class":
            self.seen.append(f"{event} {args[0]!r}"[:200])
        elif event in _FILES and args and isinstance(args[0], str | bytes | os.PathLike):
            path = os.fsdecode(args[0]).removeprefix("file://").removesuffix("?mode=ro")
            allowed = path.startswith((*self._allowed, "/proc/", "/dev/", "/sys/"))
            if not allowed and Path(path).is_absolute():
                self.seen.append(f"{event} {path}"[:200])


def work(
    reader: Reader, seed: int, start: int, count: int, deep_every: int, folder: str, pipe: Any
) -> None:
    """Try inputs from start to count in this process, and report each before it is tried."""
    place = Path(folder)
    prepare(reader, place)
    attempt(reader, place, reader.seeds[0], deep=True)  # imports what it needs
    watch = Watch(place)
    statistics = Path("/proc/self/statm").read_text()
    limit = int(statistics.split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak()

    def ring(_number: int, _frame: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, ring)
    for number in range(start, count):
        pipe.send(("at", number))
        data = numbered(reader, seed, number)
        began = time.perf_counter()
        problem = None
        outcome = ""
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        watch.on = True
        try:
            outcome = attempt(reader, place, data, deep=number % deep_every == 0)
        except TooSlowError:
            problem = f"took more than {SECONDS:g} s"
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = (
                f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
            )
        finally:
            watch.on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if watch.seen:
            problem = problem or f"touched {watch.seen[0]}"
            watch.seen.clear()
        pipe.send(("done", number, outcome, problem, time.perf_counter() - began))
    pipe.send(("end", _peak() - before))


def _peak() -> float:
    """Largest memory so far, MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


@dataclass
class Result:
    """The results of a reader's inputs."""

    reader: str
    inputs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    memory_mb: float = 0.0

    def take(self, number: int, outcome: str, problem: str | None, seconds: float) -> None:
        self.inputs += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        if problem is None:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        else:
            self.failures.append({"number": number, "problem": problem})


def fuzz(reader_name: str, base: Path, seed: int, count: int, deep_every: int) -> Result:
    """All inputs of a reader, in processes that are replaced when an input kills them."""
    result = Result(reader_name)
    context = multiprocessing.get_context("spawn")
    start = 0
    while start < count:
        with tempfile.TemporaryDirectory(dir=_memory_disk()) as folder:
            ours, theirs = context.Pipe()
            arguments = (reader_name, str(base), seed, start, count, deep_every, folder, theirs)
            child = context.Process(target=_work_by_name, args=arguments)
            child.start()
            theirs.close()
            start = _listen(ours, child, result, start, count)
            child.join()
    return result


def _work_by_name(name: str, base: str, *rest: Any) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - torch's warnings
    reader = next(r for r in readers(Path(base)) if r.name == name)
    work(reader, *rest)


def _listen(pipe: Any, child: Any, result: Result, start: int, count: int) -> int:
    """Collect what a process reports; returns the number of the next input."""
    at: int | None = None
    while True:
        try:
            if not pipe.poll(3 * SECONDS if at is not None else 300):
                child.kill()
                result.take(start if at is None else at, "", "does not come back", 3 * SECONDS)
                break
            message = pipe.recv()
        except EOFError:
            child.join()
            how = f"the process died with {child.exitcode}"
            result.take(start if at is None else at, "", how, 0.0)
            break
        if message[0] == "at":
            at = message[1]
        elif message[0] == "done":
            result.take(*message[1:])
        else:
            result.memory_mb = max(result.memory_mb, message[1])
            return count
    return (start if at is None else at) + 1


def _memory_disk() -> str | None:
    shared = Path("/dev/shm")  # noqa: S108 - files that live for a millisecond
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None


def store(results: list[Result], options: argparse.Namespace) -> None:
    """Write the figures so far; earlier figures of other readers stay."""
    from mpdiag.files.atomic import write_json
    from mpdiag.runs import provenance

    path: Path = options.json
    kept = json.loads(path.read_text())["readers"] if path.is_file() else []
    figures = [{**vars(r), "failures": r.failures[:20], "failed": len(r.failures)} for r in results]
    for figure in figures:
        figure |= {"seed": options.seed, "deep_every": options.deep_every}
        figure |= {k: round(figure[k], 3) for k in ("slowest_s", "seconds", "memory_mb")}
    names = {figure["reader"] for figure in figures}
    kept = [figure for figure in kept if figure["reader"] not in names]
    write_json(path, {"versions": provenance.versions(), "readers": [*kept, *figures]})


def main(words: Iterable[str] | None = None) -> int:
    """Run it; 1 if there is any failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of readers, with commas between")
    parser.add_argument("--deep-every", type=int, default=DEEP_EVERY)
    parser.add_argument("--again", type=int, help="try one input of one reader, here")
    parser.add_argument("--json", type=Path, help="store the figures here")
    options = parser.parse_args(None if words is None else list(words))
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        record_run(base / "run")
        found = list(readers(base))
        wanted = options.only.split(",") if options.only else [r.name for r in found]
        if options.again is not None:
            reader = next(r for r in found if r.name == wanted[0])
            folder = base / "again"
            folder.mkdir()
            prepare(reader, folder)
            data = numbered(reader, options.seed, options.again)
            print(data[:2_000])
            deep = options.again % options.deep_every == 0
            print(attempt(reader, folder, data, deep=deep))
            return 0
        results = []
        print(
            f"{'reader':20}{'inputs':>8}{'read':>8}{'refused':>9}{'failed':>8}{'slowest':>10}{'memory':>9}"
        )
        for name in wanted:
            result = fuzz(name, base, options.seed, options.count, options.deep_every)
            results.append(result)
            read = result.outcomes.get("read", 0)
            refused = sum(result.outcomes.values()) - read
            print(
                f"{name:20}{result.inputs:8}{read:8}{refused:9}{len(result.failures):8}"
                f"{result.slowest_s:8.2f} s{result.memory_mb:6.0f} MB",
                flush=True,
            )
            for failure in result.failures[:8]:
                print(f"    {failure['number']}: {failure['problem']}", flush=True)
            if options.json is not None:
                store(results, options)
    return int(any(r.failures for r in results))


if __name__ == "__main__":
    sys.exit(main())
