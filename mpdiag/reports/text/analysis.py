"""What ``analyze`` prints: all that decides in whole sentences, and, verbosely, the details."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.blocks.choice import BlockAnalysis
from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.plan_check import PlanCheck
from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
from mpdiag.display.wording import (
    counted,
    layer_name,
    magnitude,
    percent,
    scale_text,
    some_of,
    spoken_layer,
)
from mpdiag.files.paths import AnyPath
from mpdiag.numerics.formats import BF16, FORMATS, FP16, TRAINABLE
from mpdiag.numerics.loss_scalers import LARGEST_SCALE
from mpdiag.plan import Fp32Choice, PrecisionPlan, ShapeAdvice, Verdict
from mpdiag.precision.half_choice import fp16_or_bf16
from mpdiag.reports import next_commands
from mpdiag.reports.text.audit import answers_text
from mpdiag.reports.text.charts import Histogram
from mpdiag.reports.text.tables import EXPLAIN, Fitted, add_findings, finding_lines, titled_rows

FINDINGS = 3
"""Findings that are shown without ``-v``, which shows all."""
TOP = 8
SHOWN_SHAPES = 10


def summary_text(analysis: Analysis) -> Iterator[RenderableType]:
    """What to print, part by part; lines break between words, and nothing is cut."""
    yield _verdict(analysis)
    yield _provenance(analysis, model=False)
    yield Text("")
    rows = titled_rows()
    if analysis.advises:
        for title, words in _plan(analysis):
            rows.add_row(title, Text(words))
        if analysis.findings:
            rows.add_row("", "")
    add_findings(rows, analysis.findings[:FINDINGS], more=len(analysis.findings) - FINDINGS)
    bounds = analysis.verdict.not_examined
    if bounds:
        rows.add_row("", "")
        rows.add_row("Not checked", Text("; ".join(bounds)))
    if can_be_settled(analysis):
        rows.add_row("To settle it", Text(" ".join(map(str, settling_command(analysis)))))
    yield rows
    yield from _half_precision(analysis)


def _half_precision(analysis: Analysis) -> Iterator[RenderableType]:
    """What a recording of half precision says of the choice of a format, and what it answers."""
    choice = fp16_or_bf16(analysis)
    if choice is not None:
        yield Text("\nFP16 or BF16?", style="bold")
        yield Text(choice.text)
        rows = titled_rows()
        for title, words in choice.grounds.items():
            rows.add_row(title, Text(words))
        yield rows
    if analysis.run.half_precision.computed:
        yield from answers_text(analysis.answers)


def _plan(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """The plan's decisions: title and words."""
    plan = analysis.plan
    scale = plan.loss_scale
    if scale.need == "unknown":
        words = "not known"
    elif analysis.target not in TRAINABLE:
        words = f"none: {analysis.target.label} has a scale per tensor"
    elif scale.need == "not needed" and (scale.upper or math.inf) > LARGEST_SCALE:
        words = f"{scale_text(scale.recommended)} ({scale.method}), {scale.need}"
    else:
        words = f"{scale_text(scale.recommended)} ({scale.method}), {scale.need}"
        if analysis.loss_scale.fits and scale.upper is not None and scale.upper > scale.lower:
            words += f"; any from {scale_text(scale.lower)} to {scale_text(scale.upper)} works"
    yield "Loss scale", words
    needed = "needed" if plan.master_weights.needed else "not shown to be needed"
    why = plan.master_weights.reason.partition("; ")[0]  # the rest: -v
    yield "Master weights", f"{needed}: {why}"
    named = dict.fromkeys(" in ".join(filter(None, (c.op, c.module))) for c in _kept(plan))
    names = f": {', '.join(named)}" if named else ""
    yield "Stay in FP32", kept_in_fp32(analysis) + names


def analysis_text(analysis: Analysis, *, verbose: bool = False) -> RenderableType:
    """The whole report of ``mpdiag analyze``.

    Args:
        analysis: What was found.
        verbose: With the reason of each size to pad.
    """
    parts: list[RenderableType] = [_verdict(analysis), _provenance(analysis), Text("")]
    if not analysis.concluded:  # nothing below would be true of another training
        told = [*finding_lines(analysis.findings), Text(EXPLAIN, "dim")]
        return Group(*parts, *told, *_grounds(analysis), *_half_precision(analysis))
    if analysis.advises:
        parts += [_facts(analysis), Text("")]
    if analysis.findings:
        parts += [*finding_lines(analysis.findings), Text(EXPLAIN, "dim")]
    parts += [*_grounds(analysis), *_half_precision(analysis), Text("")]
    parts += [_deciding_layers(analysis), Text(""), *gradients_picture(analysis), Text("")]
    if analysis.operations:
        parts += [_proven(analysis), Text("")]
    elif analysis.plan.fp32_operations:
        parts += [_operations(analysis), Text("")]
    parts.append(_formats(analysis))
    if analysis.plan.shapes:
        parts += [Text(""), shapes_table(analysis.plan, verbose=verbose)]
    return Group(*parts)


def check_text(check: PlanCheck) -> RenderableType:
    """Whether a stored plan holds, and where not."""
    head = Text(check.verdict, style="bold green" if check.holds else "bold red")
    return Group(head, *finding_lines(check.findings))


def shapes_table(plan: PrecisionPlan, *, verbose: bool = False) -> RenderableType:
    """The sizes to pad so that Tensor Cores run well, those of the most work first.

    Args:
        plan: Whose.
        verbose: All of them, each with why, what it costs, what is not proved, and what to mask;
            else a line each.
    """
    title = "Shapes to pad for Tensor Cores"
    if verbose:
        table = Fitted(
            ("module", "dimension", "size", "of the work", "why"),
            title,
            sentences=frozenset({"why"}),
            right=frozenset({"size", "of the work"}),
            lead=3,
        )
        for advice in plan.shapes:
            table.add_row(*_size_cells(advice), _share_of_work(advice), advice.reason)
        return table
    table = Fitted(
        ("module", "dimension", "size", "adds", "of the work", "proved"),
        title,
        right=frozenset({"size", "adds", "of the work"}),
        spare=("adds", "of the work"),
        lead=6,
    )
    for advice in plan.shapes[:SHOWN_SHAPES]:
        added = f"+{percent(advice.padded / advice.size - 1)}"
        proved = "no" if advice.evidence.get("proved") is False else "yes"
        table.add_row(*_size_cells(advice), added, _share_of_work(advice), proved)
    more = len(plan.shapes) - SHOWN_SHAPES
    parts = (
        f"and {more} more" if more > 0 else "",
        _together(plan.shapes[0]) if plan.shapes else "",
        "-v shows why, and what to mask or check",
    )
    return replace(table, caption="; ".join(part for part in parts if part))


def _size_cells(advice: ShapeAdvice) -> tuple[str, str, str]:
    return layer_name(advice.module), advice.dimension, f"{advice.size} → {advice.padded}"


def _share_of_work(advice: ShapeAdvice) -> str:
    return percent(float(advice.evidence.get("share_of_flops") or 0.0))


def _together(advice: ShapeAdvice) -> str:
    """What all changes cost and gain; "" in plans of earlier versions."""
    cost, time = (advice.evidence.get(f"model_{n}") for n in ("cost_flops", "expected_time"))
    if not isinstance(cost, (int, float)) or not isinstance(time, (int, float)):
        return ""
    return f"all of them: {percent(cost)} more matrix FLOPs, expected time {percent(time)}"


def after_analysis(
    analysis: Analysis, run: AnyPath, plan: Path | None = None
) -> tuple[object, ...]:
    """The words of the command to run next.

    Args:
        analysis: The analysis.
        run: The run folder, as it was typed.
        plan: Where the plan was written, if it was.
    """
    if analysis.blocks is not None:
        return _after_blocks(analysis.blocks, run, plan)
    if not analysis.advises:  # a plan would rest on nothing
        return "mpdiag", "report", run
    if analysis.rounded_to is not None:
        return settling_command(analysis) if analysis.run.script_words else next_commands.NOTHING
    if analysis.target == FP16 and any(f.code == "no-loss-scale-fits" for f in analysis.findings):
        return "mpdiag", "analyze", run, "--target", BF16.name, "-o", "plan.json"
    done = next_commands.after_training(run, analysis.plan)
    if done:
        return done
    if plan is not None:
        train = next_commands.train_by(analysis.plan, plan, analysis.run)
        if train:
            return train
    layer = analysis.loss_scale.deciding_layer
    if layer:
        return "mpdiag", "why", run, layer
    if plan is not None:
        return "mpdiag", "export", plan, "--to", "torch"
    target = () if analysis.target == FP16 else ("--target", analysis.target.name)
    return "mpdiag", "analyze", run, *target, "-o", "plan.json"


def _after_blocks(blocks: BlockAnalysis, run: AnyPath, plan: Path | None) -> tuple[object, ...]:
    """The export of a plan for a block recipe; without one, the layer with the most effect."""
    target = blocks.recipe.target
    if plan is not None and any(layer.quantised for layer in blocks.plan.layers):
        return "mpdiag", "export", plan, "--to", blocks.recipe.engines[0]
    worst = blocks.worst()
    return ("mpdiag", "why", run, worst[0], "--target", target) if worst else next_commands.NOTHING


def _verdict(analysis: Analysis) -> Text:
    """The verdict; its colour repeats it."""
    level = analysis.verdict.level
    bad = level == "cannot" or any(f.severity == "error" for f in analysis.findings)
    tone = "bold red" if bad else "bold green" if level == "shown" else "bold"
    return Text(analysis.verdict.text, tone)


def _provenance(analysis: Analysis, *, model: bool = True) -> Text:
    meta = analysis.run.meta
    kind = f"{(meta.get('model') or {}).get('type', 'model')}, " if model else ""
    steps = f"{meta.get('steps_recorded', 0)} of {meta.get('steps_seen', 0)} steps recorded"
    return Text(f"{analysis.run.folder}: {kind}{steps}, {meta.get('state', 'unknown')}", "dim")


def grounds(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """What a verdict rests on and what was not looked at: titles and clauses; empty ones left out."""
    parts = (("Rests on", verdict.evidence), ("Not checked", verdict.not_examined))
    return tuple((title, "; ".join(clauses)) for title, clauses in parts if clauses)


def _grounds(analysis: Analysis) -> list[RenderableType]:
    """What the verdict rests on, what was not looked at, and the check that would settle it."""
    verdict = analysis.verdict
    grid = titled_rows()
    for title, clauses in grounds(verdict):
        grid.add_row(title, escape(clauses))
    if can_be_settled(analysis):
        grid.add_row("To settle it", escape(" ".join(map(str, settling_command(analysis)))))
    return [Text(""), grid]


def can_be_settled(analysis: Analysis) -> bool:
    """Whether a check would show more: in a format that can be trained in here, if none was made."""
    open_still = analysis.verdict.level == "expected" and analysis.probe is None
    runs = analysis.rounded_to is not None or not analysis.run.is_refused
    return open_still and runs and analysis.target in TRAINABLE


def settling_command(analysis: Analysis) -> tuple[object, ...]:
    """The words of the check that shows what a recording cannot.

    It is a search or a short probe; of a training in half precision, a recording in FP32.
    """
    run = analysis.run
    if analysis.rounded_to is not None:
        return "mpdiag", "record", "--fp32", "--", *(run.command_words or ("script.py", "ARGS"))
    argv = [str(word) for word in run.meta.get("argv") or []]
    if argv[1:2] == ["demo"]:
        return "mpdiag", "search", _workload(argv[2:], run.folder.name)
    script = run.command_words or ("script.py", "ARGS")
    aim = analysis.plan.aim
    target = () if aim == FP16.name else ("--target", aim)
    return "mpdiag", "analyze", run.folder, *target, "--probe", "--", *script


def _workload(words: list[str], folder: str) -> str:
    """The workload of a demo, by its words and by its run folder's name (``ssd-2`` is a second one)."""
    name = re.sub(r"-\d+$", "", folder)
    first = words[0] if words else "ssd"
    return name if name in words or first.startswith("-") else first


def _facts(analysis: Analysis) -> Table:
    scale, plan = analysis.loss_scale, analysis.plan
    grid = titled_rows()
    known = plan.loss_scale.need != "unknown"
    grid.add_row(
        "Loss scale",
        "not known"
        if not known
        else f"{scale_text(plan.loss_scale.recommended)} ({plan.loss_scale.method}), "
        f"{plan.loss_scale.need}" + escape(_admissible(scale)),
    )
    if plan.loss_scale.reason not in {f.message for f in analysis.findings}:  # said once
        grid.add_row("", escape(plan.loss_scale.reason))
    if known:
        grid.add_row("Lost to zero", _lost(analysis))
    grid.add_row("Master weights", escape(plan.master_weights.reason))
    grid.add_row("Stay in FP32", kept_in_fp32(analysis))
    return grid


def _lost(analysis: Analysis) -> str:
    """What all layers together lose to zero; the verdict's own figure is of its window."""
    figures = analysis.figures
    if not figures.layers():
        return f"nothing: no recorded gradient is {analysis.target.label}"
    before, after = figures.find("all-values"), figures.find("all-values-scaled")
    if before is None:
        return "not known"
    scaled = f", {after.said} {after.at_scale}" if after else ""
    return f"{before.said} of all activation gradients' values {before.where} {before.at_scale}{scaled}"


def _admissible(scale: LossScaleAnalysis) -> str:
    """Which loss scales work, and the layers that set the limits."""
    plan = scale.plan
    if scale.deciding_layer is None and scale.limiting_layer is None:
        return ""
    upper = scale_text(plan.upper)
    lower, end = scale_text(plan.lower), scale.figures.find("scale-lower")
    lowest = spoken_layer(scale.deciding_layer if end is None else end.layer)
    highest = spoken_layer(scale.limiting_layer)
    if not scale.fits or scale.tight:
        return f"; no scale fits: {lowest} needs at least {lower}, {highest} at most {upper}"
    return (
        f"; any scale from {lower} (below: {lowest} underflows) to {upper} "
        f"(above: {highest} overflows) works"
        if plan.lower > 1
        else f"; any scale up to {upper} works (above: {highest} overflows)"
    )


def _deciding_layers(analysis: Analysis) -> RenderableType:
    """The layers that lose most, from the table that the verdict's sentence is made of."""
    figures = analysis.figures
    first = figures.find("layer-sum")
    if first is None:
        return Text("no activation gradients", style="dim")
    numbers = ["|g| max", "values lost", "Σ|g| lost"]
    scaled = figures.find("layer-values-scaled")
    if scaled is not None:
        numbers.append(f"values lost at {scale_text(scaled.scale or 1.0)}")
    label = FORMATS[first.format].label
    table = Fitted(
        ("activation gradients of", *numbers),
        f"Layers with the most underflow in {label} {first.at_scale}, {first.where}",
        right=frozenset(numbers),
        spare=("|g| max",),
    )
    late = analysis.loss_scale.late
    largest = dict(zip(map(str, late.names), late.histograms.absmax.tolist(), strict=True))
    layers = figures.layers()
    for layer in layers[:TOP]:
        cells = [
            magnitude(largest[layer]),
            figures.said("layer-values", layer),
            figures.said("layer-sum", layer),
            figures.said("layer-values-scaled", layer),
        ]
        table.add_row(layer_name(layer), *cells[: len(numbers)])
    if len(layers) > TOP:
        table.caption = f"{TOP} of {len(layers)} layers; mpdiag why shows any of them"
    return table


def gradients_picture(analysis: Analysis) -> list[RenderableType]:
    """The histogram of all activation gradients with FP16's window; nothing where there are none."""
    gradients = analysis.layers.of_kind("activation_grad")
    if len(gradients) == 0:
        return []
    scale = analysis.plan.loss_scale.recommended
    words = (
        f"Activation gradients of all layers {analysis.figures.all_steps}, counts on a log scale"
    )
    title = Text(words, style="bold")
    fmt = FP16 if analysis.target.needs_tensor_scale else analysis.target
    drawing = Histogram(gradients.histograms.merged(), fmt, scale)
    return [title, drawing]


_NOTHING_MORE = "only autocast's own list"


def kept_in_fp32(analysis: Analysis) -> str:
    """How much stays in FP32, in words."""
    plan = analysis.plan
    kept = _kept(plan)
    if not kept:
        return _NOTHING_MORE
    if not analysis.run.meta.get("operations", {}).get("steps"):
        return counted(len(kept), "module")
    covered = sum(bool(c.evidence.get("policy")) for c in plan.fp32_operations)
    more = f", and {covered} on autocast's own list" if covered else ""
    return counted(len(kept), "operation or module", "operations or modules") + more


def _kept(plan: PrecisionPlan) -> list[Fp32Choice]:
    """What stays in FP32 beyond the policy: operations, and modules without which no scale fits."""
    proven = [c for c in plan.fp32_operations if not c.evidence.get("policy")]
    return proven + [c for c in plan.fp32_modules if c not in proven]


_COVERED = {
    "": "",
    "lists": " (autocast's own list covers it)",
    "neighbours": " (only at O2 and O3: at O1 the operations around it run in FP32)",
}


def _proven(analysis: Analysis) -> RenderableType:
    why = "why, and what happens without it"
    table = Fitted(
        ("operation", "where", why, "bytes", "FLOPs"),
        "Operations that FP16 cannot represent, as recorded",
        "bytes, FLOPs: share of all operations of the step, with its backward pass",
        sentences=frozenset({why}),
        right=frozenset({"bytes", "FLOPs"}),
        lead=2,
    )
    for f in analysis.operations:
        covered = _COVERED[f.covered_by]
        table.add_row(
            f.op,
            f"{f.module or '(outside)'}\n{f.where}",
            f"{f.told}; {f.without}{covered}\n→ {f.fix}",
            percent(f.bytes_share),
            percent(f.flops_share),
        )
    return table


def _operations(analysis: Analysis) -> RenderableType:
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for choice in analysis.plan.fp32_operations:
        reason = choice.reason if choice.evidence.get("overflow") else choice.reason.split(":")[0]
        grouped[choice.op, reason].append(layer_name(choice.module))
    table = Fitted(
        ("operation", "modules", "why"), "Stay in FP32", sentences=frozenset({"modules", "why"})
    )
    for (op, reason), modules in grouped.items():
        table.add_row(op, some_of(modules), reason)
    return table


def _formats(analysis: Analysis) -> RenderableType:
    title = f"Values lost by format, {analysis.figures.all_steps}"
    kinds = ("activation", "activation_grad", "weight", "weight_grad")
    headings = tuple(kind.replace("_", " ") for kind in kinds)
    table = Fitted(("format", *headings), title, right=frozenset(headings))
    for name, summary in analysis.formats.items():
        cells = []
        for kind in kinds:
            losses = summary["kinds"].get(kind)
            if losses is None:
                cells.append("–")
                continue
            text = f"{percent(losses['underflow'])} to 0"
            if losses["overflow"]:
                text += f", {percent(losses['overflow'])} to ∞"
            cells.append(text)
        table.add_row(name, *cells)
    scale = at_scale(analysis.plan.loss_scale.recommended)
    table.caption = f"FP16 gradients {scale}; FP8 with a scale per layer"
    return table
