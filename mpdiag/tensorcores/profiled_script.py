"""``mpdiag profile -- script.py``: profile an unmodified script in a separate process.

The child runs the script as ``record`` does, but only watches its optimizers' steps. Once enough of
them are measured it ends the script, because a training may last days. The parent reads what was
captured. The script's output goes to stderr.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.errors import InputError, MpdiagError, UsageError
from mpdiag.launching.processes import launcher_of, own_process, stderr_file
from mpdiag.launching.script import AfterTorch, parse, run
from mpdiag.tensorcores.inductor_code import LOG_FOLDER

if TYPE_CHECKING:
    from mpdiag.tensorcores.step_profiler import StepProfiler

_MODULE = "mpdiag.tensorcores.profiled_script"  # run as a program in the child
_NOTE = "capture.json"


@dataclass(frozen=True)
class Launched:
    """A script that was profiled.

    Attributes:
        result: The verdict: a ``Profile``, on a CPU a ``CpuProfile``.
        exit_code: The script's; 0 if it was ended after the last measured step.
    """

    result: Any
    exit_code: int


def profile_script(words: Sequence[str], *, steps: int, warmup: int) -> Launched:
    """Run a script and profile a few of its steps.

    Args:
        words: What one would type after ``python``: the script and its arguments, or ``-m``, a
            module and its arguments.
        steps: How many steps to measure.
        warmup: How many to skip first.

    Raises:
        UsageError: If there is nothing to run, or no step was measured.
        InputError: If the script does not exist.
    """
    if launcher_of(words) is not None:
        raise UsageError(
            "profile runs one process: give it the script, or start it in each with "
            "`torchrun … -m mpdiag profile -- script.py`"
        )
    script = parse(words)
    with tempfile.TemporaryDirectory(prefix="mpdiag-") as name:
        folder = Path(name)
        command = own_process(_MODULE, name, str(steps), str(warmup), *script.words)
        # A log that the user asked for stays theirs.
        environment = {"TORCH_TRACE": str(folder / LOG_FOLDER), **os.environ}
        sys.stderr.flush()
        code = subprocess.run(
            command, check=False, stdout=stderr_file(), env=environment
        ).returncode
        note = _note(folder)
        if not note.get("measured"):
            raise _why_nothing(code, note, warmup)
        from mpdiag.tensorcores.step_profiler import read_capture

        return Launched(read_capture(folder, int(note["measured"])), code)


def _note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _why_nothing(code: int, note: dict[str, Any], warmup: int) -> MpdiagError:
    if note.get("error"):
        return InputError(str(note["error"]))
    if code:
        return UsageError(
            f"the script ended with exit code {code} before a step was measured: see its output"
        )
    seen = int(note.get("seen", 0))
    if seen:
        return UsageError(
            f"the script took {seen} steps, of which {warmup} are for warming up: lower --warmup"
        )
    return UsageError(
        "no optimizer took a step in the script's own process: to profile inference, or a process "
        "that it starts, write `with mpdiag.profile(model) as p:` around the loop and call p.step()"
    )


class _Enough(BaseException):
    """Ends the script; its own ``except Exception`` cannot catch this."""


class _StepCapture:
    """Captures the optimizer steps of this process."""

    def __init__(self, folder: Path, steps: int, warmup: int) -> None:
        self._folder = folder
        self._steps = steps
        self._warmup = warmup
        self._capture: StepProfiler | None = None
        self._hook: Any = None

    def attach(self) -> None:
        """Begin to capture; torch has been imported."""
        if self._warmup:
            self._begin()
            return
        from torch.nn.modules.module import register_module_forward_pre_hook

        # Without warm-up steps the window opens with the first call of a model: before it, a script
        # may still move the model to its device or change its settings.
        self._hook = register_module_forward_pre_hook(self._first_call)

    def _first_call(self, *_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._begin()

    def _begin(self) -> None:
        from mpdiag.tensorcores.step_profiler import StepProfiler

        self._capture = StepProfiler(
            steps=self._steps, warmup=self._warmup, folder=self._folder, on_done=_stop
        )
        self._capture.__enter__()

    def finish(self) -> dict[str, Any]:
        """Stop, and return how many steps were seen and measured."""
        capture, self._capture = self._capture, None
        if capture is None:
            return {}
        capture.__exit__(None, None, None)
        return {"seen": capture.seen, "measured": capture.measured}


def _stop() -> None:
    raise _Enough


def _run(folder: Path, steps: int, warmup: int, words: list[str]) -> int:
    """Run the script; returns its exit code."""
    steps_captured = _StepCapture(folder, steps, warmup)
    AfterTorch(steps_captured.attach).install()
    _end_threads_quietly()
    code = 0
    error = ""
    try:
        code = run(parse(words)).code
    except _Enough:
        pass
    except InputError as problem:  # the module does not exist
        error = str(problem)
    finally:
        note = {**steps_captured.finish(), "error": error}
        (folder / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    return code


def _end_threads_quietly() -> None:
    """Keep Python from printing a traceback when a script's training thread is ended."""
    show = threading.excepthook

    def excepthook(args: Any) -> None:
        if not issubclass(args.exc_type, _Enough):
            show(args)

    threading.excepthook = excepthook


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
