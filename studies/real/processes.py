"""One command of the study in a process of its own, and what it left."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import runpy
import sys
import time
import traceback
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_LAST_LINE = re.compile(r"^([a-z][a-z ]*): (-?(?:[\d.]+(?:e[-+]?\d+)?|inf|nan))$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: Its exit code; a signal's number, negative, where one ended it.
        seconds: How long it took.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
    """

    code: int
    seconds: float
    out: str
    err: str

    @property
    def metric(self) -> tuple[str, float] | None:
        """The name and value of the last line of the form ``name: value``."""
        found = _LAST_LINE.findall(self.out)
        return (found[-1][0], float(found[-1][1])) if found else None


def run_alone(script: Path, arguments: Sequence[str]) -> None:
    """What ``python SCRIPT ARGUMENTS`` does."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def run_mpdiag(arguments: Sequence[str]) -> None:
    """What ``mpdiag ARGUMENTS`` does."""
    from mpdiag.cli import main

    sys.argv = ["mpdiag", *arguments]
    main()


def in_a_child(task: Callable[[], None], place: Path, name: str) -> Outcome:
    """Run a task in a forked process, in its folder, with its output in files.

    Args:
        task: What to do; ``SystemExit`` gives the exit code.
        place: The folder; the outputs are ``NAME.out`` and ``NAME.err`` in it.
        name: The outputs' name.
    """
    place.mkdir(parents=True, exist_ok=True)
    outputs = [place / f"{name}.out", place / f"{name}.err"]
    sys.stdout.flush()
    sys.stderr.flush()
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(_as_child(task, place, outputs))
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, seconds, *(path.read_text(errors="replace") for path in outputs))


def _as_child(task: Callable[[], None], place: Path, outputs: Sequence[Path]) -> int:
    code = 0
    try:
        os.chdir(place)
        for number, path in enumerate(outputs, 1):
            handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(handle, number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.environ["COLUMNS"] = "1000"  # so that no line is broken
        task()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - it is the child's end, whatever it is
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # what an interpreter runs at its end
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def tensors_digest(saved: Path) -> str | None:
    """A digest of the bytes of all tensors in a file of ``torch.save``; None without a file."""
    if not saved.exists():
        return None
    digest = hashlib.sha256()
    with zipfile.ZipFile(saved) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        for name in sorted(names, key=lambda name: int(name.rsplit("/", 1)[1])):
            digest.update(archive.read(name))
    return digest.hexdigest()
