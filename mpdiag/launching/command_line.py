"""What ``mpdiag record`` and ``mpdiag train`` run: a script in this process, or torchrun around it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.launching import processes
from mpdiag.launching.script import parse
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import META, open_run
from mpdiag.runs.training_log import FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.files.paths import AnyPath
    from mpdiag.launching.recorded_script import Options
    from mpdiag.launching.trained_script import TrainedScript
    from mpdiag.training.options import Backend


def record_command(
    words: Sequence[str], out: Path | None, options: Options
) -> tuple[int, AnyPath | None]:
    """Record the script that the words after ``--`` name.

    Returns:
        The exit code, and the run to name, if any.

    Raises:
        MpdiagError: As ``recorded_script.record_script``.
    """
    from mpdiag.launching.recorded_script import record_script

    launcher = processes.launcher_of(words)
    if launcher is not None:
        folder = out or processes.claim_run(Path("runs"), _name(launcher))
        command = ["record", "--out", str(folder), *options.words()]
        return processes.launch(processes.through_launcher(launcher, command)), None
    ending, run = record_script(parse(words), out, options)
    if run is not None:
        processes.release_claims(run)
    return ending.code, run


def train_command(
    words: Sequence[str], plan: Path, out: Path | None, *, backend: Backend
) -> tuple[int, TrainedScript | None]:
    """Train the script that the words after ``--`` name, by a plan.

    Returns:
        The exit code, and what was trained; None where a launcher's processes say it.

    Raises:
        MpdiagError: As ``trained_script.train_script``.
    """
    from mpdiag.launching.trained_script import train_script

    launcher = processes.launcher_of(words)
    if launcher is not None:
        folder = out or processes.claim_run(Path("runs"), f"{_name(launcher)}-plan")
        command = ["train", "--plan", str(plan), "--out", str(folder), "--backend", backend]
        return processes.launch(processes.through_launcher(launcher, command)), None
    trained = train_script(parse(words), plan, out, backend=backend)
    if trained.folder is not None:
        processes.release_claims(trained.folder)
    return trained.ending.code, trained


def recording_of(plan: Path, run: AnyPath) -> AnyPath | None:
    """The recording that a plan was made from, if it lies beside a run and holds losses."""
    name = PrecisionPlan.load(plan).run
    recording = run.parent / Path(name).name
    if not name or not (recording / FILE).is_file() or not (recording / META).is_file():
        return None
    return recording if open_run(recording).parts() else None


def _name(arguments: Sequence[str]) -> str:
    """A run's name from torchrun's arguments: the first word that is a script."""
    scripts = (Path(word).stem for word in arguments if word.endswith(".py"))
    return next(scripts, "torchrun")
