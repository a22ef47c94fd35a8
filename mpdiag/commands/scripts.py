"""``record``, ``train`` and ``profile``: what runs a script, or reads its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from mpdiag.commands.base import JsonOption, StrictOption, app, exit_on_findings
from mpdiag.errors import UsageError
from mpdiag.files.paths import is_remote, place

_SCRIPT = {"allow_interspersed_args": False}
ScriptWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT ARGS…", help="What you would type after `python`."),
]


@app.command(context_settings=_SCRIPT)
def record(
    script: ScriptWords = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", parser=place, help="Run folder or URL; default runs/NAME."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Record each N-th step; default dense, then sparse.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Record so many steps; the script goes on alone.")
    ] = None,
    include: Annotated[str | None, typer.Option(help="Regular expression: only these.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Regular expression: not these.")] = None,
    operations: Annotated[
        int | None, typer.Option(min=0, help="Steps to record every operation of; default 3.")
    ] = None,
) -> None:
    """Run a training script unmodified and record it. Results stay bit-identical."""
    from mpdiag.launching.commands import record_words
    from mpdiag.launching.recorded_script import Options
    from mpdiag.reports import terminal

    options = Options(every, max_steps, include, exclude, operations)
    code, run = record_words(script or [], out, options)
    if run is not None:
        terminal.name_next("mpdiag", "analyze", _shown(run), "-o", "plan.json")
    raise typer.Exit(code)


@app.command(context_settings=_SCRIPT)
def train(
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="What `mpdiag analyze -o` wrote.")],
    script: ScriptWords = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", parser=place, help="Run folder or URL; default runs/NAME-FORMAT."
        ),
    ] = None,
    backend: Annotated[
        Literal["auto", "native", "emulated"],
        typer.Option(help="The device's own arithmetic, or FP32 that rounds what it stores."),
    ] = "auto",
) -> None:
    """Train an unmodified script by a plan. Casts, loss scale, skipped steps."""
    from mpdiag.launching.commands import train_words
    from mpdiag.reports import terminal

    code, run, summary = train_words(script or [], plan, out, backend=backend)
    if run is not None:
        terminal.remark(summary)
        recorded = _recording_of(plan, run)
        if recorded is not None:
            terminal.name_next("mpdiag", "compare", _shown(recorded), _shown(run))
        else:
            terminal.name_next("mpdiag", "runs", _shown(run.parent))
    raise typer.Exit(code)


def _recording_of(plan: Path, run: Path) -> Path | None:
    """The recording that a plan was made from, if it lies beside a run and holds losses."""
    from mpdiag.plan import PrecisionPlan
    from mpdiag.runs.run import META, open_run
    from mpdiag.runs.training_log import FILE

    name = PrecisionPlan.load(plan).run
    recording = run.parent / Path(name).name
    if not name or not (recording / FILE).is_file() or not (recording / META).is_file():
        return None
    return recording if open_run(recording).parts() else None


def _shown(folder: Path) -> Path:
    """A path as short as it can be typed here."""
    if is_remote(folder):
        return folder
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


class _Profile(TyperCommand):
    """Keeps what stands after ``--`` as it was typed: a script follows it, not a trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[args.index("--") + 1 :] if "--" in args else None
        ctx.meta["script"] = words
        return super().parse_args(ctx, args)


@app.command(cls=_Profile)
def profile(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]",
            help="Of torch.profiler, nsys (sqlite), ncu or nvprof (CSV); - for stdin.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Of the script after --.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a script to measure.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps to let pass first.")] = 5,
    against: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", help="An earlier trace: what moved onto Tensor Cores since?"),
    ] = None,
    as_json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Say whether matrix work ran on Tensor Cores. For a script after --, or a trace."""
    from mpdiag.reports import terminal
    from mpdiag.reports.text.profile import show_profile

    script = context.meta["script"]
    given = len(arguments or []) + (trace is not None)
    code = 0
    if given > (1 if script is None else len(script)):
        message = "one trace at a time: give the earlier one with --against, a script after --"
        raise UsageError(message)
    if script is None and trace is None:
        message = "give a trace, or a script after --: mpdiag profile -- script.py ARGS"
        raise UsageError(message)
    if script is not None or trace is None:
        from mpdiag.launching.processes import announced_ranks
        from mpdiag.launching.profiled_script import profile_script

        launched = profile_script(script or [], steps=steps, warmup=warmup)
        result, code = launched.result, launched.exit_code
        if announced_ranks()[0] > 0:  # one rank tells of what all do
            raise typer.Exit(code)
    else:
        from mpdiag.tensorcores.profile import profile_trace

        with terminal.waiting(f"reading {trace}"):
            result = profile_trace(trace)
    change = None
    if against is not None:
        from mpdiag.tensorcores.change import compare_profiles
        from mpdiag.tensorcores.profile import profile_trace
        from mpdiag.tensorcores.verdicts import Profile

        if not isinstance(result, Profile):
            message = "--against compares traces of a GPU: give two of them"
            raise UsageError(message)
        with terminal.waiting(f"reading {against}"):
            change = compare_profiles(profile_trace(against), result)
    document = show_profile(result, against, change, as_json=as_json)
    if code:
        raise typer.Exit(code)
    exit_on_findings(strict, (finding["severity"] for finding in document["findings"]))
