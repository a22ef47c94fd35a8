"""``mpdiag record``: an unmodified training script, recorded."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mpdiag.commands.shared.options import ScriptWords, refuse_file, shortest_path
from mpdiag.files.paths import AnyPath, is_remote, place


def record(
    script: ScriptWords = None,
    out: Annotated[
        Path | None,
        Option(metavar="RUN", parser=place, help="Run folder or URL; default runs/NAME."),
    ] = None,
    every: Annotated[
        int | None,
        Option(metavar="N", help="Record every N-th step. Default: dense at first, then sparse."),
    ] = None,
    max_steps: Annotated[
        int | None,
        Option(metavar="N", help="Stop recording after N recorded steps; the script runs on."),
    ] = None,
    include: Annotated[
        str | None,
        Option(metavar="REGEX", help="Record only names that match this regular expression."),
    ] = None,
    exclude: Annotated[
        str | None,
        Option(metavar="REGEX", help="Record no names that match this regular expression."),
    ] = None,
    operations: Annotated[
        int | None,
        Option(min=0, metavar="N", help="Record operations in N steps; default 3, then more."),
    ] = None,
    fp32: Annotated[
        bool, Option("--fp32", help="Train in FP32: no autocast, FSDP policy or half weights.")
    ] = False,
    trace: Annotated[
        bool, Option("--trace", help="Record values in 2 steps, or --trace-steps, for mpdiag diff.")
    ] = False,
    trace_steps: Annotated[
        str | None,
        Option(metavar="N,N,…", help="Record them in these steps, counted from 0.", hidden=True),
    ] = None,
    live: Annotated[
        bool, Option("--live", help="Show steps and loss while the script runs.")
    ] = False,
    blocks: Annotated[
        bool,
        Option("--blocks", help="Record what MXFP8, MXFP4, NVFP4 and FP8 by block would lose."),
    ] = False,
) -> None:
    """Run a training script unmodified and record it. Results stay bit-identical."""
    from mpdiag.launching.recorded_script import Options, record_command
    from mpdiag.reports import next_commands, terminal

    refuse_file(out or Path("runs"), "--out")
    options = Options(
        every,
        max_steps,
        include,
        exclude,
        operations,
        fp32,
        live,
        blocks=blocks,
        trace=trace,
        trace_steps=trace_steps,
    )
    recorded = record_command(script or [], out, options)
    run = recorded.folder
    if run is not None:
        analysis = next_commands.analyze_it(shortest_path(run))
        say = terminal.remark if recorded.missed is None else terminal.complain
        if not analysis:
            say(f"no step was recorded: there is nothing to analyze in {run}")
        else:
            prefix = "" if recorded.missed is None else "the recording is incomplete: "
            say(prefix + _written(shortest_path(run), recorded.missed))
        terminal.name_next(*analysis)
    raise typer.Exit(recorded.code)


def _written(run: AnyPath, seen: int | None) -> str:
    """What a recording wrote, in a line; of a URL the size would take a transfer for each file.

    Args:
        run: The recording.
        seen: How many steps it saw; default: as it says.
    """
    from mpdiag.display.wording import counted
    from mpdiag.runs.run import open_run

    meta = open_run(run).meta
    steps = counted(seen or meta.get("steps_seen") or 0, "step")
    line = f"{meta.get('steps_recorded') or 0:,} of {steps} recorded into {run}"
    if is_remote(run):
        return line
    size = sum(f.stat().st_size for f in run.rglob("*") if f.is_file())
    return f"{line} ({size / 1e6:.1f} MB)" if size >= 1e5 else f"{line} ({size / 1e3:.0f} kB)"
