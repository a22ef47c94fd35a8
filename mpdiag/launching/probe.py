"""A short probe: a script's first steps in FP32 and by a plan, each in a process of its own.

Both sides are ``mpdiag train``: in FP32 by a plan of level O0, which casts and scales nothing. Each is
ended when it has logged the steps that are wanted. The script runs twice from its start, and what it
writes itself, it writes twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.analysis.verdict.probe import Probe
from mpdiag.errors import InputError, MpdiagError
from mpdiag.plan import LossScalePlan
from mpdiag.runs.training_log import FILE, TrainingLog, read_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.plan import PrecisionPlan

STEPS = 50
SECONDS = 600.0
"""After so long a side is ended with what it has."""
_POLL = 0.1


def run_probe(
    plan: PrecisionPlan, words: Sequence[str], *, steps: int = STEPS, seconds: float = SECONDS
) -> Probe:
    """Train a script's first steps twice, and put the losses side by side.

    Args:
        plan: The plan to try, with its rounding emulated.
        words: The script and its arguments, as after ``--``.
        steps: How many steps to train.
        seconds: How long a side may take.

    Raises:
        InputError: If the script fails, or no losses were seen.
    """
    in_fp32 = replace(plan, level="O0", loss_scale=LossScalePlan())
    with tempfile.TemporaryDirectory(prefix="mpdiag-probe-") as place:
        sides = [
            _train(side, words, Path(place) / name, steps, seconds)
            for name, side in (("fp32", in_fp32), ("plan", plan))
        ]
    fp32, by_plan = ({s.step: s for s in side.steps[:steps]} for side in sides)
    common = [s for s in sorted(fp32.keys() & by_plan.keys()) if fp32[s].loss is not None]
    pairs = [(fp32[s].loss, by_plan[s].loss) for s in common]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        message = "the probe saw no losses to compare: does the script call backward() on one?"
        raise InputError(message)
    return Probe(
        fp32=tuple(a for a, _ in known),
        by_plan=tuple(b for _, b in known),
        skipped=sum(s.skipped for s in by_plan.values()),
        wanted=steps,
    )


def _train(
    plan: PrecisionPlan, words: Sequence[str], place: Path, steps: int, seconds: float
) -> TrainingLog:
    """Train in a child process until its log holds so many steps."""
    place.mkdir()
    plan.save(place / "plan.json")
    run = place / "run"
    command = [sys.executable, "-m", "mpdiag", "train", "--plan", str(place / "plan.json")]
    command += ["--out", str(run), "--backend", "emulated", "--", *words]
    with (place / "output").open("w+b") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(child, run / FILE, steps, seconds)
        finally:
            _end(child)
        if code not in (None, 0):
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            if not _logged(run / FILE):
                message = (
                    f"the probe's script failed: {lines[-1] if lines else f'exit code {code}'}"
                )
                raise InputError(message)
    try:
        return read_log(run)
    except MpdiagError as error:
        message = f"the probe logged nothing within {seconds:g} seconds ({error})"
        raise InputError(message) from None


def _wait(child: subprocess.Popen[bytes], log: Path, steps: int, seconds: float) -> int | None:
    """Wait until the log holds so many steps or the time is over (None), or for the exit code."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        code = child.poll()
        if code is not None:
            return code
        if _logged(log) >= steps:
            return None
        time.sleep(_POLL)
    return None


def _logged(log: Path) -> int:
    """How many whole lines a log holds."""
    try:
        return log.read_bytes().count(b"\n")
    except OSError:
        return 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that we started, with the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
