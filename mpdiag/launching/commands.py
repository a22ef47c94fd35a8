"""The words of a command line, run: a script in this process, or a launcher that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.launching import processes
from mpdiag.launching.script import parse

if TYPE_CHECKING:
    from collections.abc import Sequence


def record_words(
    words: Sequence[str],
    out: Path | None,
    *,
    every: int | None,
    max_steps: int | None,
    include: str | None,
    exclude: str | None,
) -> tuple[int, Path | None]:
    """``mpdiag record``: returns the exit code and the run to name, if any.

    Raises:
        MpdiagError: As ``recording.record_script``.
    """
    from mpdiag.launching.recording import record_script

    launcher = processes.launcher_of(words)
    if launcher is not None:
        folder = out or processes.claim_run(Path("runs"), _name(launcher))
        options = {"every": every, "max-steps": max_steps, "include": include, "exclude": exclude}
        given = [w for k, v in options.items() if v is not None for w in (f"--{k}", str(v))]
        command = ["record", "--out", str(folder), *given]
        return processes.launch(processes.through_launcher(launcher, command)), None
    ending, run = record_script(
        parse(words), out, every=every, max_steps=max_steps, include=include, exclude=exclude
    )
    return ending.code, run


def _name(arguments: Sequence[str]) -> str:
    """A run's name from torchrun's arguments: the first word that is a script."""
    scripts = (Path(word).stem for word in arguments if word.endswith(".py"))
    return next(scripts, "torchrun")
