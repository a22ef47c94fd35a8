"""``mpdiag train``: an unmodified training script, trained by a plan."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from mpdiag.commands.shared.options import ScriptWords, refuse_file, shortest_path
from mpdiag.files.paths import AnyPath, place


def train(
    plan: Annotated[Path, Option(metavar="PLAN", help="The plan that `mpdiag analyze -o` wrote.")],
    script: ScriptWords = None,
    out: Annotated[
        Path | None,
        Option(metavar="RUN", parser=place, help="Run folder or URL; default runs/NAME-FORMAT."),
    ] = None,
    backend: Annotated[
        Literal["auto", "native", "emulated"],
        Option(help="The device's own arithmetic, or FP32 rounded to the plan's format."),
    ] = "auto",
) -> None:
    """Train an unmodified script by a plan. Casts, loss scale, skipped steps."""
    from mpdiag.launching.trained_script import recording_of, train_command
    from mpdiag.reports import next_commands, terminal

    refuse_file(out or Path("runs"), "--out")
    code, trained = train_command(script or [], plan, out, backend=backend)
    run = None if trained is None else trained.folder
    if trained is not None and trained.missed is not None:
        terminal.remark(trained.summary)
        terminal.complain(_missing(run, trained.missed))
    elif trained is not None and run is not None:
        terminal.remark(trained.summary)
        recorded = recording_of(plan, run)
        if code != 0:
            pass  # no comparison, nor any other command, would say more than the error did
        elif recorded is not None and trained.comparable:
            terminal.name_next("mpdiag", "compare", shortest_path(recorded), shortest_path(run))
        else:
            terminal.name_next(*next_commands.after_seed(shortest_path(run)))
    raise typer.Exit(code)


def _missing(run: AnyPath | None, trained: int) -> str:
    """What a run lacks of a training that went on without it."""
    from mpdiag.display.wording import counted
    from mpdiag.runs.training_log import FILE, read_log

    logged = len(read_log(run).steps) if run is not None and (run / FILE).is_file() else 0
    place_of = f" in {shortest_path(run)}" if run is not None else ""
    return f"the run is incomplete: {logged:,} of {counted(trained, 'step')} logged{place_of}"
