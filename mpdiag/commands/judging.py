"""``analyze``, ``why``, ``replay`` and ``compare``: what was recorded, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.base import (
    JsonOption,
    RunArgument,
    ScalerOption,
    StrictOption,
    Target,
    app,
    exit_on_findings,
)
from mpdiag.errors import UsageError
from mpdiag.files.atomic import writing
from mpdiag.files.paths import place
from mpdiag.numerics.loss_scalers import Backoff
from mpdiag.runs.run import META


@app.command()
def analyze(
    run: RunArgument,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here.")
    ] = None,
    strict: StrictOption = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN", help="Does this plan still hold? --strict then asks nothing else."
        ),
    ] = None,
    target: Annotated[Target, typer.Option(help="The format to train in.")] = "fp16",
) -> None:
    """Say what a run needs. Loss scale, master weights, operations in FP32, formats."""
    from mpdiag.analysis.analyzer import analyze as analyze_run
    from mpdiag.analysis.plan_check import check_plan
    from mpdiag.plan import PrecisionPlan
    from mpdiag.reports import terminal, text

    stored = None if against is None else PrecisionPlan.load(against)
    analysis = analyze_run(run, target=target)
    check = None if stored is None else check_plan(stored, analysis.plan)
    if output is not None:
        with writing(output):
            analysis.plan.save(output)
    if as_json:
        checked = {} if check is None else {"against": check.to_json()}
        terminal.show_json(analysis.to_json() | checked)
    else:
        if check is not None:
            terminal.show(text.check_text(check), "")
        terminal.show(text.analysis_text(analysis))
        broken = check is not None and not check.holds
        remake = ("mpdiag", "analyze", run, "-o", against)
        terminal.name_next(*(remake if broken else text.after_analysis(analysis, run, output)))
    asked = analysis if check is None else check
    exit_on_findings(strict, (finding.severity for finding in asked.findings))


@app.command()
def why(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", parser=place, help="The run's folder, its URL, or a skip capsule."
        ),
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
    """Tell one layer's story, or a skipped step's. Without LAYER, of the one that loses most."""
    if layer is None and (model is not None or as_json or not (run / META).is_file()):
        _why_skipped(run, model, as_json)
        return
    if model is not None or as_json:
        message = "--model and --json belong to a capsule: give them without LAYER"
        raise UsageError(message)
    from mpdiag.analysis.layer_story import explain
    from mpdiag.reports import terminal, text

    story = explain(run, layer)
    terminal.show(text.layer_text(story))
    if layer is None:
        others = ", ".join(name for name in story.worst if name and name != story.name)
        terminal.remark(f"this layer loses most; name another one to read of it: {others}")
    terminal.name_next("mpdiag", "replay", run)


def _why_skipped(capsule: Path, model: str | None, as_json: bool) -> None:
    from mpdiag.reports import terminal, text
    from mpdiag.training.skips.capsule import is_capsule, load_capsule
    from mpdiag.training.skips.capsule_replay import builder_named, replay_capsule

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
        terminal.name_next("mpdiag", "compare", "--help")


@app.command()
def replay(
    run: RunArgument,
    scaler: ScalerOption = Backoff.name,
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
    from mpdiag.analysis.scaling.replay import replay_run
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
        terminal.name_next("mpdiag", "analyze", run, "-o", "plan.json")


@app.command()
def compare(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A", parser=place, help="Reference: a run, a folder of runs, a baseline."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", parser=place, help="Candidate, likewise.")],
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
    strict: StrictOption = False,
) -> None:
    """Say whether B trains as well as A. Equivalent, different, or how many seeds would decide."""
    from mpdiag.analysis.comparing.comparison import compare as compare_sides
    from mpdiag.analysis.comparing.groups import save_baseline
    from mpdiag.reports import terminal
    from mpdiag.reports.comparison import comparison_text

    comparison = compare_sides(a, b, metric=metric, margin=margin)
    if output is not None:
        with writing(output):
            save_baseline(comparison.a, output)
    if as_json:
        terminal.show_json(comparison.to_json())
    else:
        terminal.show(comparison_text(comparison))
        terminal.name_next("mpdiag", "dashboard", b.parent)
    exit_on_findings(strict, (finding.severity for finding in comparison.findings))
