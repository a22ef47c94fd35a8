"""The words of a command line, run: a script in this process, or a launcher that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.launching import processes
from mpdiag.launching.script import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.launching.recorded_script import Options
    from mpdiag.training.options import Backend


def record_words(
    words: Sequence[str], out: Path | None, options: Options
) -> tuple[int, Path | None]:
    """``mpdiag record``: returns the exit code and the run to name, if any.

    Raises:
        MpdiagError: As ``recording.record_script``.
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


def train_words(
    words: Sequence[str], plan: Path, out: Path | None, *, backend: Backend
) -> tuple[int, Path | None, str]:
    """``mpdiag train``: returns the exit code, the run to name, if any, and a summary.

    Raises:
        MpdiagError: As ``training.train_script``.
    """
    from mpdiag.launching.trained_script import train_script

    launcher = processes.launcher_of(words)
    if launcher is not None:
        folder = out or processes.claim_run(Path("runs"), f"{_name(launcher)}-plan")
        command = ["train", "--plan", str(plan), "--out", str(folder), "--backend", backend]
        return processes.launch(processes.through_launcher(launcher, command)), None, ""
    trained = train_script(parse(words), plan, out, backend=backend)
    if trained.folder is not None:
        processes.release_claims(trained.folder)
    return trained.ending.code, trained.folder, trained.summary


def _name(arguments: Sequence[str]) -> str:
    """A run's name from torchrun's arguments: the first word that is a script."""
    scripts = (Path(word).stem for word in arguments if word.endswith(".py"))
    return next(scripts, "torchrun")
