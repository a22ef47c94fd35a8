"""Separates oneDNN's lines from the rest of this process's standard output.

oneDNN prints from C, bypassing ``sys.stdout``, so the file descriptor itself is redirected into a
file. Everything else that was printed meanwhile is printed afterwards, in its order.

oneDNN says its version and its instruction set once in a process. Those lines are kept, and lead what
each later capture returns.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from mpdiag.tensorcores.cpu.onednn import PREFIX, is_introduction

if TYPE_CHECKING:
    from typing import IO

_STDOUT = 1
_introduction: list[str] = []  # oneDNN's, of this process


class StdoutCapture:
    """Collects standard output in a file between ``open`` and ``close``."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._saved = -1

    def open(self) -> None:
        """Redirect standard output into a file."""
        _flush()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._saved = os.dup(_STDOUT)
        os.dup2(self._file.fileno(), _STDOUT)

    def close(self) -> list[str]:
        """Restore standard output, print everyone else's lines, and return oneDNN's."""
        if self._file is None:
            return []
        _flush()
        os.dup2(self._saved, _STDOUT)
        os.close(self._saved)
        with self._file as written:
            written.seek(0)
            lines = written.read().decode("utf-8", "replace").splitlines(keepends=True)
        self._file = None
        others = "".join(line for line in lines if not line.startswith(PREFIX))
        if others:
            os.write(_STDOUT, others.encode())
        own = [line for line in lines if line.startswith(PREFIX)]
        said = [line for line in own if is_introduction(line)]
        if said:
            _introduction[:] = said
            return own
        return [*_introduction, *own] if own else []


def _flush() -> None:
    """Flush Python's and C's buffers, so that text stays on its side of the redirection."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
