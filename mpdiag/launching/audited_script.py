"""``mpdiag audit -- script.py``: a script's first steps, recorded in a process of its own."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpdiag.errors import InputError
from mpdiag.files.documents import read_document
from mpdiag.launching.processes import own_process, stderr_file
from mpdiag.runs.run import META, Run, open_run

STEPS = 3
SECONDS = 600.0
"""After so long the script is ended with the steps that it has."""
_POLL = 0.1


@contextmanager
def first_steps(words: Sequence[str], steps: int = STEPS) -> Iterator[Run]:
    """A recording of a script's first steps, with every operation; it is gone after the block.

    The script is ended once they are recorded. What it prints goes to stderr.

    Args:
        words: The script and its arguments, as after ``--``; ``torchrun`` may start it.
        steps: How many steps to record.

    Raises:
        InputError: If no step was recorded.
    """
    with tempfile.TemporaryDirectory(prefix="mpdiag-audit-") as place:
        folder = Path(place) / "run"
        many = str(steps)
        command = own_process("mpdiag", "record", "--out", str(folder), "--every", "1")
        command += ["--max-steps", many, "--operations", many, "--", *words]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stderr_file(), start_new_session=True
        )

        def recorded() -> bool:
            with contextlib.suppress(OSError, ValueError):  # it is not there yet
                return bool(read_document(folder / META).get("state") != "recording")
            return False

        try:
            code = wait_for(child, recorded, SECONDS)
        finally:
            end_group(child)
        if not (folder / META).exists():
            ended = f"ended with exit code {code}" if code else "ended"
            raise InputError(f"no step was recorded: the script {ended} before its first one")
        yield open_run(folder)


def wait_for(
    child: subprocess.Popen[bytes], done: Callable[[], bool], seconds: float
) -> int | None:
    """Wait until a child has done enough or the time is over (None), or for its exit code."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        code = child.poll()
        if code is not None:
            return code
        if done():
            return None
        time.sleep(_POLL)
    return None


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child that we started, with the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
