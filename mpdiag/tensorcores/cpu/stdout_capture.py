"""Takes oneDNN's lines out of what this process writes to its standard output.

oneDNN prints from C, past ``sys.stdout``, so the file descriptor itself is led into a file for a
while. Whatever else was printed meanwhile is printed afterwards, in its order.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from mpdiag.tensorcores.cpu.onednn import PREFIX

if TYPE_CHECKING:
    from typing import IO

_STDOUT = 1


class StdoutCapture:
    """Between ``open`` and ``close`` standard output goes into a file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._saved = -1

    def open(self) -> None:
        """Begin."""
        _flush()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._saved = os.dup(_STDOUT)
        os.dup2(self._file.fileno(), _STDOUT)

    def close(self) -> list[str]:
        """End, print what others wrote, and return oneDNN's lines."""
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
        return [line for line in lines if line.startswith(PREFIX)]


def _flush() -> None:
    """Python's buffer and C's, so that each side's text lands on its side."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
