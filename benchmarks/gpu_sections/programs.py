"""Programs that a section starts: their output goes to files, for a pipe would outlive them.

A program ended at its limit may leave children that hold its pipe open, and reading it would then
wait for them. They end with the part's own process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_sections import forks, runner

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 5.0
"""Seconds that a program is given at least."""


@dataclass(frozen=True)
class Ran:
    """How a program ended.

    Attributes:
        code: Its exit code; None if it was ended at its limit.
        out, err: What it printed.
    """

    code: int | None
    out: str
    err: str

    def expect_success(self) -> None:
        """Refuse a program that failed.

        Raises:
            RuntimeError: With its exit code and the last of what it said.
        """
        if self.code:
            message = f"exit code {self.code}: {(self.err or self.out)[-300:]}"
            raise RuntimeError(message)


def run(words: Sequence[object], seconds: float, folder: Path | None = None) -> Ran:
    """Run a program to its end, or to its limit."""
    with tempfile.TemporaryDirectory(prefix="mpdiag-gpu-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        child = _start([str(w) for w in words], out, err, folder or Path.cwd())
        try:
            code: int | None = child.wait(max(LEAST, seconds))
        except (subprocess.TimeoutExpired, TimeoutError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
            code = None
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Ran(code, *said)


def _start(words: list[str], out: Path, err: Path, folder: Path) -> runner.Process:
    """A process in this one's group; in a rehearsal a copy of one that has torch already."""
    server = os.environ.get(forks.SOCKET)
    if server is not None and words[:3] == mpdiag():
        order = {"words": words[2:], "environment": dict(os.environ), "group": os.getpgrp()}
        places = {"folder": str(folder), "out": str(out), "err": str(err)}
        return forks.Fork(server, {**order, **places})
    with out.open("wb") as first, err.open("wb") as second:
        streams = {"stdout": first, "stderr": second, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(words, cwd=folder, **streams)


def mpdiag(*words: object) -> list[object]:
    """The words that start the command line of this checkout."""
    return [sys.executable, "-m", "mpdiag", *words]
