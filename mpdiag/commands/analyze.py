"""``mpdiag analyze``: what a recorded run needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from typer import Option

from mpdiag.commands.shared import options
from mpdiag.errors import UsageError
from mpdiag.files.atomic import writing
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, BUDGET, EMULATED

if TYPE_CHECKING:
    from mpdiag.analysis.analyzer import Analysis


def analyze(
    run: options.RunArgument,
    as_json: options.JsonOption = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Also show layers, histogram, formats and shapes.")
    ] = False,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="PLAN", help="Write the plan to this file.")
    ] = None,
    strict: options.StrictOption = False,
    against: Annotated[
        Path | None,
        Option(
            metavar="PLAN",
            help="Check whether this plan still holds. --strict then checks only that.",
        ),
    ] = None,
    target: Annotated[
        options.Target,
        Option(metavar="FORMAT", help=f"To train in: {', '.join(get_args(options.Target))}."),
    ] = "fp16",
    shards: Annotated[
        int, Option(min=1, metavar="N", help="Advise shapes for N tensor-parallel parts.")
    ] = 1,
    budget: Annotated[
        float | None,
        Option(min=0, max=1, metavar="SHARE", help=f"FLOPs in BF16 of block formats ({BUDGET})."),
    ] = None,
    probe: Annotated[
        bool, Option("--probe", help="Also train the script's first steps by the plan.")
    ] = False,
    script: options.ScriptWords = None,
) -> None:
    """Say what a run needs. Loss scale, master weights, operations in FP32, formats."""
    from mpdiag.analysis.analyzer import analyze as analyze_run
    from mpdiag.analysis.plan_check import check_plan
    from mpdiag.commands.shared.kept_plan import keep_plan, refuse_trained, trained_by
    from mpdiag.plan import PrecisionPlan
    from mpdiag.precision.half_choice import fp16_or_bf16
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.analysis import after_analysis, analysis_text, check_text, summary_text
    from mpdiag.reports.text.blocks import blocks_text

    if output is not None:
        options.refuse_suffix(output, "a plan", (".json",))
        refuse_trained(output)
    if budget is not None and target not in BLOCK_RECIPES:
        raise UsageError(f"--budget is for block formats, and {target} is none: leave it out")
    stored = None if against is None else PrecisionPlan.load(against)
    analysis = analyze_run(
        run, target=target, shards=shards, budget=BUDGET if budget is None else budget
    )
    if probe or script:
        analysis = _probed(analysis, script, probe=probe)
    check = None if stored is None else check_plan(stored, analysis.plan, analysis.unconfirming)
    if output is not None:
        with writing(output):
            analysis.plan.save(output)
    kept = keep_plan(analysis.run, analysis.plan)
    if as_json:
        checked = {} if check is None else {"against": check.to_json()}
        choice = fp16_or_bf16(analysis)
        chosen = {} if choice is None else {"fp16_or_bf16": choice.to_json()}
        terminal.show_json(analysis.to_json() | chosen | checked)
    else:
        if check is not None:
            terminal.show(check_text(check), "")
        if analysis.blocks is not None:
            whole = blocks_text(analysis, verbose=verbose)
        else:
            whole = iter(
                [analysis_text(analysis, verbose=True)] if verbose else summary_text(analysis)
            )
        terminal.show(*whole)
        broken = check is not None and not check.holds
        if kept is not None and output is None:  # the plan was asked for elsewhere
            terminal.remark(kept)
        if broken and against is not None:
            folder = against if against.is_dir() else against.parent
            trained = trained_by(folder)
            terminal.name_next(*next_commands.after_check(run, against, target, trained=trained))
        else:
            terminal.name_next(*after_analysis(analysis, run, output))
    judged = analysis if check is None else check
    refused = analysis.blocks is not None and analysis.verdict.level == "cannot"
    severities = ["error"] if refused and check is None else []
    options.exit_on_findings(strict, severities + [f.severity for f in judged.findings])


def _probed(analysis: Analysis, script: list[str] | None, *, probe: bool) -> Analysis:
    """The analysis after a probe of the script, by default of the one that was recorded."""
    from mpdiag.analysis.verdict.evidence import fp32_losses_of_inductor
    from mpdiag.analysis.verdict.probe import write_probe
    from mpdiag.analysis.verdict.trained import takes_results
    from mpdiag.launching.probe import run_probe
    from mpdiag.reports import terminal

    words = script or analysis.run.command_words
    if not probe:
        raise UsageError("a script after -- is for the probe: add --probe")
    if not words:
        raise UsageError("--probe needs the script: mpdiag analyze RUN --probe -- script.py ARGS")
    other = "FP32" if analysis.blocks is None else "BF16"
    if analysis.blocks is not None:
        terminal.remark(f"{analysis.blocks.recipe.label} {EMULATED}")
    with terminal.waiting(f"training the first steps in {other} and by the plan"):
        found = run_probe(analysis.plan, words, recorded=fp32_losses_of_inductor(analysis.run))
    run = analysis.run
    try:
        if takes_results(run):
            write_probe(run.folder, found, analysis.plan.digest())
    except OSError as error:
        terminal.remark(f"cannot store the probe in {run.folder}: {error.strerror or error}")
    return analysis.with_probe(found)
