"""A short probe: a script's first steps by a plan and in a reference, each in a process of its own.

Both sides are ``mpdiag train``: in FP32 by a plan of level O0, which casts and scales nothing. A plan
with block formats is compared with itself without them, in BF16. Each is
ended when it has logged the steps that are wanted. The script runs twice from its start, and what it
writes itself, it writes twice.
"""

import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpdiag.analysis.verdict.probe import Probe
from mpdiag.errors import InputError, MpdiagError
from mpdiag.launching.audited_script import end_group, wait_for
from mpdiag.launching.processes import own_process
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.runs.training_log import FILE, TrainingStep, read_log

STEPS = 50
SECONDS = 600.0
"""After so long a side is ended with what it has."""


def run_probe(
    plan: PrecisionPlan,
    words: Sequence[str],
    *,
    steps: int = STEPS,
    seconds: float = SECONDS,
    recorded: Mapping[int, float] | None = None,
) -> Probe:
    """Train a script's first steps twice, and put the losses side by side.

    Args:
        plan: The plan to try, with its rounding emulated.
        words: The script and its arguments, as after ``--``.
        steps: How many steps to train.
        seconds: How long a side may take.
        recorded: The losses of an FP32 recording by step, to be compared with those that nothing
            records. Where they differ, the script is trained in FP32 once more.

    Raises:
        InputError: If the script fails, or no losses were seen.
    """
    if plan.blocks is None:
        beside = replace(plan, level="O0", loss_scale=LossScalePlan())
    else:  # BF16 is no recording's FP32
        beside, recorded = replace(plan, blocks=None), None
    with tempfile.TemporaryDirectory(prefix="mpdiag-probe-") as place:
        reference, by_plan = (
            _train(side, words, Path(place) / name, steps, seconds)
            for name, side in (("reference", beside), ("plan", plan))
        )
        losses = {s.step: s.loss for s in reference.steps}
        changed = None if recorded is None else _ulps(losses, recorded)
        again = 0
        if changed:
            other = _train(beside, words, Path(place) / "again", steps, seconds)
            again = _ulps(losses, {s.step: s.loss for s in other.steps}) or 0
    pairs = [(losses.get(s.step), s.loss) for s in by_plan.steps]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        message = "the probe saw no losses to compare: does the script call backward() on one?"
        raise InputError(message)
    return Probe(
        fp32=tuple(a for a, _ in known),
        by_plan=tuple(b for _, b in known),
        skipped=sum(s.skipped for s in by_plan.steps),
        wanted=steps,
        failure=by_plan.failure if len(by_plan.steps) < len(reference.steps) else "",
        recorder_ulps=None if changed is None else (changed, again),
        reference="FP32" if plan.blocks is None else "BF16",
    )


def _ulps(a: Mapping[int, float | None], b: Mapping[int, float | None]) -> int | None:
    """The largest difference of two trainings' losses, in FP32 ulps; None without a common one."""
    pairs = [(x, b.get(step)) for step, x in a.items()]
    common = [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(x + y)]
    if not common:
        return None
    bits = np.array(common, np.float32).view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return int(np.abs(ordered[:, 0] - ordered[:, 1]).max())


@dataclass(frozen=True)
class _Side:
    """The steps that one side logged, and the last line of one that failed."""

    steps: tuple[TrainingStep, ...]
    failure: str


def _train(
    plan: PrecisionPlan, words: Sequence[str], place: Path, steps: int, seconds: float
) -> _Side:
    """Train in a child process until its log holds so many steps."""
    place.mkdir()
    run = place / "run"
    failure = train_apart(plan, words, run, steps, seconds)
    if failure and not _logged(run / FILE):
        raise InputError(f"the probe's script failed: {failure}")
    try:
        return _Side(read_log(run).steps[:steps], failure)
    except MpdiagError as error:
        raise InputError(f"the probe logged nothing within {seconds:g} seconds ({error})") from None


def train_apart(
    plan: PrecisionPlan,
    words: Sequence[str],
    run: Path,
    steps: float = math.inf,
    seconds: float = math.inf,
) -> str:
    """Train a script by a plan, its rounding emulated, in a process of its own.

    Args:
        plan: The plan.
        words: The script and its arguments, as after ``--``.
        run: The run folder to write; its parent is there.
        steps: The training is ended once its log holds so many of them.
        seconds: And after so long.

    Returns:
        The last line of a script that failed; empty for any other.
    """
    file = run.with_name(f"{run.name}-plan.json")
    plan.save(file)
    command = ["train", "--plan", str(file), "--out", str(run), "--backend", "emulated"]
    return run_apart([*command, "--", *words], run, steps, seconds)


def run_apart(
    command: Sequence[str], run: Path, steps: float = math.inf, seconds: float = math.inf
) -> str:
    """Run a command of ours around a script in a process of its own; see ``train_apart``."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            own_process("mpdiag", *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = wait_for(child, lambda: _logged(run / FILE) >= steps, seconds)
        finally:
            end_group(child)
        if code in (None, 0):
            return ""
        output.seek(0)
        return _last_word(output.read().decode(errors="replace")) or f"exit code {code}"


def _last_word(output: str) -> str:
    """The last line that a failed script printed, before what ``mpdiag train`` adds."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if line and not line.startswith(("note: ", "next: "))]
    return said[-1] if said else ""


def _logged(log: Path) -> int:
    """How many whole lines a log holds."""
    try:
        return log.read_bytes().count(b"\n")
    except OSError:
        return 0
