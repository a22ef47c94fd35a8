"""Profile a script as it stands, in a process of its own: ``mpdiag profile -- script.py ARGS``.

The child runs the script as Python would (``sys.argv``, ``__main__``, its folder on the path) and
watches its optimizers' steps; once enough are measured it ends the script, for a training may last
days. The parent reads what was captured. What the script prints goes to stderr.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODULE = "mpdiag.tensorcores.launch"  # run as a program in the child
_NOTE = "capture.json"


@dataclass(frozen=True)
class Launched:
    """A script that was profiled.

    Attributes:
        result: The verdict: a ``Profile``, on a CPU a ``CpuProfile``.
        exit_code: The script's; 0 where it was ended after its last step.
    """

    result: Any
    exit_code: int


class _Enough(BaseException):
    """Ends the script; no ``except Exception`` of its own catches it."""


def profile_script(words: Sequence[str], *, steps: int, warmup: int) -> Launched:
    """Run a script and profile a few of its steps.

    Args:
        words: The script and its arguments, or ``-m``, a module and its arguments.
        steps: How many steps to measure.
        warmup: How many to let pass first.

    Raises:
        UsageError: If there is no such script, or no step was measured.
    """
    if not words or words == ["-m"]:
        message = "give a script to profile: mpdiag profile -- script.py ARGS"
        raise UsageError(message)
    if words[0] != "-m" and not Path(words[0]).is_file():
        message = f"there is no script {words[0]}: give its path after --"
        raise UsageError(message)
    with tempfile.TemporaryDirectory(prefix="mpdiag-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", _MODULE, name, str(steps), str(warmup), *words]
        sys.stderr.flush()
        code = subprocess.run(command, check=False, stdout=_stderr()).returncode
        note = _note(folder)
        if not note.get("measured"):
            raise UsageError(_why_nothing(code, note, warmup))
        from mpdiag.tensorcores.capture import read_capture

        return Launched(read_capture(folder, int(note["measured"])), code)


def _stderr() -> int:
    """The descriptor that takes the script's output."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by something that is no file
        return 2


def _note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _why_nothing(code: int, note: dict[str, Any], warmup: int) -> str:
    if code:
        return f"the script ended with exit code {code} before a step was measured: see its output"
    seen = int(note.get("seen", 0))
    if seen:
        return f"the script took {seen} steps, of which {warmup} are for warming up: lower --warmup"
    return (
        "no optimizer took a step in the script: to profile inference, write "
        "`with mpdiag.profile(model) as p:` around its loop and call p.step()"
    )


# -- in the child ----------------------------------------------------------------------------------


def _run(folder: Path, steps: int, warmup: int, words: list[str]) -> None:
    from mpdiag.tensorcores.capture import Capture

    capture = Capture(steps=steps, warmup=warmup, folder=folder, on_done=_stop)
    try:
        with capture:
            _run_script(words)
    except _Enough:
        pass
    finally:
        note = {"seen": capture.seen, "measured": capture.measured}
        (folder / _NOTE).write_text(json.dumps(note), encoding="utf-8")


def _stop() -> None:
    raise _Enough


def _run_script(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
