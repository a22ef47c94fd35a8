"""Programs that a section starts: their output goes to files, for a pipe would outlive them.

A program ended at its limit may leave children that hold its pipe open, and reading it would then
wait for them. They end with the part's own process group.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
        with out.open("wb") as first, err.open("wb") as second:
            streams = {"stdout": first, "stderr": second, "stdin": subprocess.DEVNULL}
            child = subprocess.Popen([str(w) for w in words], cwd=folder, **streams)
            try:
                code: int | None = child.wait(max(LEAST, seconds))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                code = None
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Ran(code, *said)


def mpdiag(*words: object) -> list[object]:
    """The words that start the command line of this checkout."""
    return [sys.executable, "-m", "mpdiag", *words]
