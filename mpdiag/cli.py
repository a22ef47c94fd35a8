"""The ``mpdiag`` command. No logic of its own: each command calls into the package and shows it.

Only typer and light modules are imported here; what a command needs, it imports when it runs, so
that ``mpdiag --help`` and shell completion answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from mpdiag.errors import ExitCode, MpdiagError, UsageError
from mpdiag.places import place
from mpdiag.version import __version__

INTERRUPTED = 130
PIPE_CLOSED = 141  # as the shell reports a program that SIGPIPE ended


class _Commands(TyperGroup):
    """The one place where errors become exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except MpdiagError as error:
            raise _failure(str(error), error.exit_code) from None
        except BrokenPipeError:
            # Nobody reads any more. What is still buffered must not fail at exit, either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            if error.filename is None:
                raise
            message = f"cannot use {error.filename}: {error.strerror}"
            raise _failure(message, ExitCode.INPUT) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        return result


def _failure(message: str, code: ExitCode) -> typer.Exit:
    from mpdiag.reports.terminal import complain

    complain(message)
    return typer.Exit(code)


app = typer.Typer(
    name="mpdiag",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # help in rich costs more time than all of the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", parser=place, help="The run's folder, or its URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Target = Literal["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
Board = Literal["tensorboard", "wandb"]
Scaler = Literal["constant", "backoff", "lognormal"]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpdiag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """Record an FP32 training, learn what mixed precision would lose, get a plan."""


@app.command()
def demo(
    workload: Annotated[str, typer.Argument(help="The workload to train.")] = "ssd",
    folder: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="Decides weights and batches.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each training; fewer show less.")
    ] = None,
    no_masters: Annotated[
        bool, typer.Option("--no-masters", help="Also train FP16 weights without FP32 masters.")
    ] = False,
    record_only: Annotated[
        bool, typer.Option("--record-only", help="Stop after the analysis.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every workload, every way, several seeds: a table.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="With --all: only this workload; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --all: how many, from 0.")] = 3,
    done: Annotated[
        bool, typer.Option("--done", help="With --all: train nothing, show what is done.")
    ] = False,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --all: as Markdown.")] = False,
) -> None:
    """Try it: record in FP32, analyze, train by the plan, compare. Takes a minute or two."""
    # Threads that wait sleep instead of spinning: on a busy machine that is five times as fast. It
    # is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if everything:
        from mpdiag.demo_all import run_table, show_table

        rows = run_table(folder, only=only or (), seeds=seeds, steps=steps, done_only=done)
        show_table(rows, folder, as_json=as_json, markdown=markdown)
        return
    from mpdiag.demo import run_demo

    run_demo(
        workload, folder, seed=seed, steps=steps, no_masters=no_masters, record_only=record_only
    )


_SCRIPT = {"allow_interspersed_args": False}
ScriptWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT ARGS…", help="What you would type after `python`."),
]


@app.command(context_settings=_SCRIPT)
def record(
    script: ScriptWords = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder; default runs/NAME.")
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Record each N-th step; default dense, then sparse.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Record so many steps; the script goes on alone.")
    ] = None,
    include: Annotated[str | None, typer.Option(help="Regular expression: only these.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Regular expression: not these.")] = None,
) -> None:
    """Run a training script unmodified and record it. Results stay bit-identical."""
    from mpdiag.launching.commands import record_words
    from mpdiag.reports import terminal

    code, run = record_words(
        script or [],
        out,
        every=every,
        max_steps=max_steps,
        include=include,
        exclude=exclude,
    )
    if run is not None:
        terminal.name_next(f"mpdiag analyze {_shown(run)}")
    raise typer.Exit(code)


@app.command(context_settings=_SCRIPT)
def train(
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="What `mpdiag analyze -o` wrote.")],
    script: ScriptWords = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder; default runs/NAME-FORMAT.")
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
        terminal.name_next(f"mpdiag runs {_shown(run.parent)}")
    raise typer.Exit(code)


def _shown(folder: Path) -> Path:
    """A path as short as it can be typed here."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


@app.command()
def analyze(
    run: RunArgument,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
    ] = False,
    target: Annotated[Target, typer.Option(help="The format to train in.")] = "fp16",
) -> None:
    """Say what a run needs. Loss scale, master weights, operations in FP32, formats."""
    from mpdiag.analysis.analyzer import analyze as analyze_run
    from mpdiag.reports import terminal, text

    analysis = analyze_run(run, target=target)
    if output is not None:
        try:
            analysis.plan.save(output)
        except OSError as error:
            message = f"cannot write {output} ({error.strerror}): give another place with -o"
            raise UsageError(message) from error
    if as_json:
        terminal.show_json(analysis.to_json())
    else:
        terminal.show(text.analysis_text(analysis))
        terminal.name_next(text.after_analysis(analysis, run))
    if strict and any(finding.severity != "info" for finding in analysis.findings):
        raise typer.Exit(ExitCode.FINDINGS)


@app.command()
def why(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or a skip capsule.")
    ],
    layer: Annotated[
        str | None, typer.Argument(metavar="[LAYER]", help="A module or parameter of the run.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="For a capsule: imported and called; returns the model and a loss function.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell one layer's story, or a skipped step's. What is lost, when, and the fix."""
    if layer is None:
        _why_skipped(run, model, as_json)
        return
    if model is not None or as_json:
        message = "--model and --json belong to a capsule: give them without LAYER"
        raise UsageError(message)
    from mpdiag.analysis.story import explain
    from mpdiag.reports import terminal, text

    terminal.show(text.layer_text(explain(run, layer)))
    terminal.name_next(f"mpdiag replay {run}")


def _why_skipped(capsule: Path, model: str | None, as_json: bool) -> None:
    from mpdiag.reports import terminal, text
    from mpdiag.training.capsule import is_capsule, load_capsule
    from mpdiag.training.capsule_replay import builder_named, replay_capsule

    if not is_capsule(capsule):
        message = f"{capsule} is no skip capsule; for a run, name a LAYER too"
        raise typer.BadParameter(message, param_hint="RUN")
    loaded = load_capsule(capsule)
    if model is None:
        message = (
            f"running the step again needs its code, a {loaded.document.get('model')}: pass "
            "--model package.module:function, which returns the model and a loss function"
        )
        raise UsageError(message)
    replayed = replay_capsule(loaded, builder_named(model))
    if as_json:
        terminal.show_json(replayed.to_json())
    else:
        terminal.show(text.skip_text(replayed.to_json(), replayed.first))
        terminal.name_next("mpdiag compare --help")


@app.command()
def replay(
    run: RunArgument,
    scaler: Annotated[Scaler, typer.Option(help="The loss scaler to run.")] = "backoff",
    init_scale: Annotated[
        float | None, typer.Option(help="Scale to begin with; by default the scaler's own.")
    ] = None,
    growth_factor: Annotated[float, typer.Option(help="Growth after a quiet interval.")] = 2.0,
    backoff_factor: Annotated[float, typer.Option(help="Factor after an overflow.")] = 0.5,
    growth_interval: Annotated[int, typer.Option(help="Steps of a quiet interval.")] = 2000,
    hysteresis: Annotated[int, typer.Option(help="Overflows in a row before backing off.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a loss scaler over a recorded run. Shows scale, skips and losses, step by step."""
    from mpdiag.analysis.replay import replay_run
    from mpdiag.reports import terminal, text

    played = replay_run(
        run,
        scaler,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )
    if as_json:
        terminal.show_json(played.to_json())
    else:
        terminal.show(text.replay_text(played))
        terminal.name_next(f"mpdiag analyze {run} -o plan.json")


@app.command()
def search(
    workload: Annotated[str, typer.Argument(help="A built-in workload, or gallery/NAME.")],
    run: Annotated[
        Path | None, typer.Option(help="Where the search is kept; the same again goes on.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Level and loss scale; default: recorded.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Minutes.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=2, help="FP32 seeds, whose spread decides.")] = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training.")] = None,
    no_lists: Annotated[
        bool, typer.Option("--no-lists", help="Everything in FP16 but what is found.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find, by training, what must stay in FP32."""
    from mpdiag.demo_search import run_search, show_search
    from mpdiag.reports import terminal

    folder = run or Path("runs") / f"search-{workload.replace('/', '-')}"
    result = run_search(
        workload, folder, plan=plan, budget=budget, seeds=seeds, steps=steps, lists=not no_lists
    )
    show_search(result, as_json=as_json)
    terminal.name_next(f"less {folder / 'plan.json'}")


@app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Reference: a run, a folder of runs, a baseline.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Candidate, likewise.")],
    metric: Annotated[str | None, typer.Option(help="Only this metric.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Largest difference that does not matter, in the metric's units."),
    ] = None,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="BASELINE", help="Store A as a baseline here."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
    ] = False,
) -> None:
    """Say whether B trains as well as A. Equivalent, different, or how many seeds would decide."""
    from mpdiag.analysis.comparison import compare as compare_sides
    from mpdiag.analysis.sides import save_baseline
    from mpdiag.reports import terminal
    from mpdiag.reports.comparison import comparison_text

    comparison = compare_sides(a, b, metric=metric, margin=margin)
    if output is not None:
        save_baseline(comparison.a, output)
    if as_json:
        terminal.show_json(comparison.to_json())
    else:
        terminal.show(comparison_text(comparison))
        terminal.name_next(f"mpdiag analyze {b}")
    if strict and any(finding.severity != "info" for finding in comparison.findings):
        raise typer.Exit(ExitCode.FINDINGS)


class _Profile(TyperCommand):
    """Remembers whether there was a ``--``, which the parser drops: a script follows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["script"] = "--" in args
        return super().parse_args(ctx, args)


@app.command(cls=_Profile)
def profile(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="[TRACE]", help="A recorded trace; or a script after --."),
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
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
    ] = False,
) -> None:
    """Say whether matrix work ran on Tensor Cores. For a script after --, or a trace."""
    from mpdiag.reports.profiling import show_profile
    from mpdiag.tensorcores.launch import profile_script
    from mpdiag.tensorcores.profile import profile_trace

    words = [str(trace), *(arguments or [])] if trace is not None else []
    code = 0
    if context.meta["script"] or not words:
        launched = profile_script(words, steps=steps, warmup=warmup)
        result, code = launched.result, launched.exit_code
    elif arguments:
        message = "one trace at a time: give the earlier one with --against, a script after --"
        raise UsageError(message)
    else:
        result = profile_trace(words[0])
    document = show_profile(result, against, as_json=as_json)
    if code:
        raise typer.Exit(code)
    if strict and any(finding["severity"] != "info" for finding in document["findings"]):
        raise typer.Exit(ExitCode.FINDINGS)


@app.command()
def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="HTML", help="Write it here; default: RUN."),
    ] = None,
) -> None:
    """Write verdict and evidence into one HTML file."""
    from mpdiag.reports import terminal
    from mpdiag.reports.html import write_report

    path = write_report(run, output)
    terminal.show(str(path))
    terminal.name_next(f"mpdiag dashboard {run.parent}")


@app.command()
def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[RUNS]", help="A folder of runs; default: the sample runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens.")] = 8501,
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
) -> None:
    """Look at runs in a browser."""
    from mpdiag.dashboard import serve

    raise typer.Exit(serve(folder, port, browser=browser))


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, or the run it lies in.")],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="The framework to write for.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as another framework's settings. Says what they cannot hold."""
    from mpdiag.exports.registry import export_plan
    from mpdiag.plan import PrecisionPlan
    from mpdiag.reports import terminal

    loaded = PrecisionPlan.load(plan / "plan.json" if plan.is_dir() else plan)
    written = export_plan(loaded, to)
    if output is not None:
        try:
            output.write_text(written.text, encoding="utf-8")
        except OSError as error:
            message = f"cannot write {output} ({error.strerror}): give another place with -o"
            raise UsageError(message) from error
    if as_json:
        terminal.show_json(written.to_json())
        return
    if output is None:
        sys.stdout.write(written.text)
    if output is not None or written.language == "json":
        for note in written.notes:
            terminal.remark(note)
    terminal.name_next(f"mpdiag train --plan {plan} -- script.py")


@app.command()
def board(
    run: RunArgument,
    to: Annotated[Board, typer.Option("--to", help="Which board.")] = "tensorboard",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="WHERE", help="TensorBoard's folder, W&B's project."
        ),
    ] = None,
) -> None:
    """Put a run on TensorBoard or W&B. Histograms, shares lost, loss and scale."""
    from mpdiag.integrations.boards import write_board
    from mpdiag.reports import terminal
    from mpdiag.runs import open_run

    written, look = write_board(open_run(run), to, output)
    terminal.show(f"{written} histograms and scalars written")
    terminal.name_next(look)


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=place, help="The folder that holds the runs.")
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, newest first."""
    from mpdiag.reports import listing, terminal
    from mpdiag.runs import list_runs

    found = list_runs(folder)
    if as_json:
        terminal.show_json(listing.runs_json(found))
    elif found:
        terminal.show(listing.runs_table(found))
        terminal.name_next(f"mpdiag analyze {found[0].folder}")
    else:
        terminal.show(f"no runs in {folder}")
        terminal.name_next("mpdiag demo")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed here, which devices, what is missing."""
    from mpdiag.reports import terminal
    from mpdiag.reports.doctor import environment_text, examine

    environment = examine()
    if as_json:
        terminal.show_json(environment.to_json())
    else:
        terminal.show(environment_text(environment))
        terminal.name_next("mpdiag demo")


def main() -> None:
    """Run the command; the entry point of the installed script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
