"""``analyze``: from a run folder to findings and a plan, by histograms alone."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpdiag.analysis import recording_checks
from mpdiag.analysis.blocks.choice import BlockAnalysis, analyze_blocks
from mpdiag.analysis.blocks.verdict import judge_blocks
from mpdiag.analysis.figures import EMPTY, FigureTable, update_figures
from mpdiag.analysis.findings import Finding, by_severity
from mpdiag.analysis.format_advice import advise_layers, choose_reduction, summarise_formats
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.operations import choice, detection
from mpdiag.analysis.operations.fp32_gradients import fp32_gradients
from mpdiag.analysis.operations.gradient_rules import run_again, site
from mpdiag.analysis.operations.graph import split
from mpdiag.analysis.operations.layer_effects import layer_evidence, within
from mpdiag.analysis.operations.loss_change import loss_curve
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.run_statistics import RunStatistics, read_statistics
from mpdiag.analysis.scaling.clipping import clipping
from mpdiag.analysis.scaling.findings import gradient_findings
from mpdiag.analysis.scaling.loss_scale import (
    LossScaleAnalysis,
    analyze_loss_scale,
    nothing_concluded,
    nothing_stored,
)
from mpdiag.analysis.scaling.windows import whole_window
from mpdiag.analysis.shapes.advice import advise_shapes, recorded_generation
from mpdiag.analysis.shapes.solution import Wanted
from mpdiag.analysis.verdict.evidence import Case, extent_of
from mpdiag.analysis.verdict.judgement import judge, unanswered
from mpdiag.analysis.verdict.probe import Probe, probe_findings, read_probe, with_probe
from mpdiag.analysis.weight_updates import advise_levels, analyze_weight_updates
from mpdiag.display.wording import counted, scale_text
from mpdiag.errors import DamagedRun
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, BUDGET, BlockRecipe, format_label
from mpdiag.numerics.formats import BF16, FP16, FloatFormat, format_named, half_of
from mpdiag.plan import Fp32Choice, MasterWeightsPlan, PrecisionPlan, Verdict
from mpdiag.runs.answers import Answer, answers
from mpdiag.runs.operations import Operation
from mpdiag.runs.results import StoredComparison, read_comparison
from mpdiag.runs.run import Run, open_run

SCHEMA_VERSION = 1
_LIKELIHOODS = re.compile("nll_loss|log_softmax|logsumexp|cross_entropy|ctc_loss|log_sigmoid")
"""Operations of losses that are negative log-likelihoods."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """The analysis of a run for a target format.

    Attributes:
        run: The recorded run.
        target: The format to train in.
        layers: Histograms by kind and name.
        loss_scale: The loss scale and the figures behind it.
        formats: Shares of values lost in every format.
        findings: Most severe first.
        plan: All decisions.
        operations: Operations that need FP32 by their recorded values; those that the operation
            policy does not cover come first. Empty if none needs it or none were recorded.
        probe: A short training by the plan, where one was made, now or earlier.
        figures: Every figure that a claim is made with: sentences and reports take them from here.
        unanswered: Why the recording allows no answer, as a sentence; empty if it allows one.
        unprobed: What a probe is added to, without one; None where that is this analysis.
        blocks: What the recording says of a block recipe, where the target is one; ``target`` is then
            BF16, the format of all that the recipe leaves alone.
    """

    run: Run
    target: FloatFormat
    layers: Layers
    loss_scale: LossScaleAnalysis
    formats: Mapping[str, Any]
    findings: tuple[Finding, ...]
    plan: PrecisionPlan
    operations: tuple[OperationFinding, ...] = ()
    probe: Probe | None = None
    figures: FigureTable = EMPTY
    unanswered: str = ""
    unprobed: "Analysis | None" = field(default=None, compare=False)
    blocks: BlockAnalysis | None = None

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Which questions the recording answers."""
        return answers(self.run.half_precision, self.run.meta)

    @property
    def rounded_to(self) -> FloatFormat | None:
        """The format that the recorded values were rounded to, if they answer in spite of that."""
        return self.run.half_precision.rounded_to if self.advises else None

    @property
    def unconfirming(self) -> str:
        """Why the recording confirms no plan, as a sentence; empty if it can."""
        stored = self.rounded_to
        return self.unanswered or (f"The training computes in {stored.label}." if stored else "")

    @property
    def concluded(self) -> bool:
        """Whether the run bears more than the findings that say why it does not."""
        return not (self.loss_scale.void and _has_gradients(self.layers))

    @property
    def advises(self) -> bool:
        """Whether its plan rests on a recording that allows an answer."""
        return self.concluded and not self.unanswered

    @property
    def verdict(self) -> Verdict:
        """The plan's verdict."""
        return self.plan.verdict

    def with_probe(self, probe: Probe) -> "Analysis":
        """The same analysis, with what a short training by its plan showed."""
        bare = self.unprobed or self
        return replace(
            bare,
            plan=replace(bare.plan, verdict=with_probe(bare.verdict, probe)),
            findings=by_severity([*probe_findings(probe), *bare.findings]),
            probe=probe,
            unprobed=bare,
        )

    def __repr__(self) -> str:
        counts = ", ".join(
            counted(sum(f.severity == severity for f in self.findings), word)
            for severity, word in (("error", "error"), ("warning", "warning"), ("info", "note"))
        )
        label = format_label(self.plan.aim)
        return f"<Analysis of {str(self.run.folder)!r} for {label}: {self.verdict} {counts}>"

    def _repr_html_(self) -> str:
        """The verdict, the findings and the plan in a notebook."""
        from mpdiag.analysis.notebook import analysis_html

        return analysis_html(self.run.name, self.target.label, self.findings, self.plan)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag analyze --json``."""
        plan = self.plan.to_json()
        return {
            "schema_version": SCHEMA_VERSION,
            "run": str(self.run.folder),
            "target": self.plan.aim,
            "verdict": plan["verdict"],
            "loss_scale": self.loss_scale.to_json(),
            "master_weights": plan["master_weights"],
            "fp32_operations": plan["fp32_operations"],
            "formats": dict(self.formats),
            "layers": self.layers.to_json(),
            "findings": [f.to_json() for f in self.findings],
            "plan": plan,
            "figures": self.figures.to_json(),
            "answers": [vars(answer) for answer in self.answers],
        } | self._further_json()

    def _further_json(self) -> dict[str, Any]:
        """The fields that not every analysis has."""
        found: dict[str, Any] = {} if self.probe is None else {"probe": self.probe.to_json()}
        if self.blocks is not None:
            found["blocks"] = self.blocks.to_json()
            found["block_baselines"] = [rule.to_json() for rule in self.blocks.baselines]
        return found


def analyze(
    run: str | os.PathLike[str] | Run,
    target: str = FP16.name,
    *,
    shards: int = 1,
    budget: float = BUDGET,
) -> Analysis:
    """Analyze a recorded run.

    Args:
        run: A run folder, or an opened run.
        target: The format to train in: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``; or a block
            recipe: ``mxfp8``, ``mxfp6``, ``mxfp4``, ``nvfp4``, ``fp8-block``, ``fp8-row`` or
            ``fp8-tensor``.
        shards: The number of tensor-parallel parts. The advised shapes fit each part.
        budget: Of a block recipe: the share of the matrix FLOPs that may stay in BF16.

    Raises:
        InputError: If the run is missing, damaged, empty, of a newer schema, or has only NaN gradients.
        ValueError: If there is no such format, or ``budget`` is no share.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget must be a share from 0 to 1, not {budget!r}")
    opened = run if isinstance(run, Run) else open_run(Path(run))
    if target in BLOCK_RECIPES:
        recipe = BLOCK_RECIPES[target]
        return _in_blocks(analyze(opened, BF16.name, shards=shards), recipe, budget, shards)
    fmt = format_named(target)
    statistics = read_statistics(opened)
    layers = statistics.layers()
    half = opened.half_precision
    recording_checks.require_finite_gradients(opened, layers, half.label)
    gradient_format = half_of(fmt)
    scale = _scale(opened, statistics, layers, gradient_format)
    masters = analyze_weight_updates(statistics, fmt, layers, half.weights)
    if scale.void and _has_gradients(layers):
        # What overflows or is lost there says nothing of an FP32 training that goes well.
        return _nothing_concluded(opened, fmt, layers, scale, statistics)
    by_kind = choice.choose_fp32_operations(layers, opened.modules(), gradient_format)
    recorded = _fp32_operations(opened)
    scale, proven = _with_operations(opened, statistics, scale, gradient_format)
    modules = tuple(c for c in by_kind if c.evidence.get("overflow"))
    named, operations = modules, by_kind
    if recorded:
        modules = choice.proven_modules(by_kind, proven)
        single = choice.proven_operations(proven)
        named = choice.leading_modules(modules, single, split(recorded))
        operations = (*named, *single)
    named = (*named, *_modules_apart(scale))
    curve = loss_curve(opened)
    wanted = Wanted(fmt.name, recorded_generation(opened.meta), shards)
    shapes, shape_findings = advise_shapes(opened, wanted)
    narrow = list(detection.bf16_findings(recorded, fmt, curve))
    bf16 = fmt != BF16 and not narrow
    findings = by_severity(
        [
            *_findings(opened, fmt, layers, scale, modules, proven, bf16=bf16),
            *shape_findings,
            *narrow,
            *detection.refused_findings(recorded),
            *recording_checks.period_findings(opened, statistics.steps().tolist()),
            *recording_checks.clipping_findings(clipping(opened.operations())),
        ]
    )
    exponent = int(np.log2(scale.plan.recommended))
    world = int(opened.meta.get("world_size") or 1)
    effects = layer_evidence(recorded, operations if recorded else (), curve, proven)
    plan = PrecisionPlan(
        run=opened.name,
        target=fmt.name,
        level="O1",
        loss_scale=scale.plan,
        master_weights=masters,
        reduction=choose_reduction(layers, scale.plan.recommended, world),
        levels=advise_levels(opened, statistics, masters),
        model=opened.model_fingerprint(),
        conditions=opened.conditions(),
        fp32_operations=operations,
        fp32_modules=named,
        shapes=shapes,
        layer_formats=advise_layers(layers, exponent, effects),
    )
    case = replace(
        _case(opened, fmt, scale, findings, statistics, plan),
        fp32_modules=len(modules),
        unmended=choice.beyond_any_plan(proven),
        run_again=run_again(recorded, gradient_format),
    )
    return _probed(
        Analysis(
            run=opened,
            target=fmt,
            layers=layers,
            loss_scale=scale,
            formats=summarise_formats(layers, exponent, half.rounded_to),
            findings=findings,
            plan=replace(plan, verdict=judge(case)),
            operations=proven,
            figures=scale.figures + update_figures(masters, whole_window(statistics.steps())),
            unanswered=unanswered(case),
        )
    )


def in_recipes(analysis: Analysis) -> dict[str, BlockAnalysis]:
    """What a run's recorded operands say of every block recipe; empty where it has none."""
    rows = analysis.run.block_operands()
    known = rows, analysis.run.modules(), analysis.layers, loss_curve(analysis.run)
    return {name: analyze_blocks(*known, recipe) for name, recipe in BLOCK_RECIPES.items() if rows}


def _in_blocks(analysis: Analysis, recipe: BlockRecipe, budget: float, shards: int) -> Analysis:
    """The analysis for BF16, with a block recipe in its plan and its verdict.

    A probe of BF16 itself is left out: it was of another plan.
    """
    bare = analysis.unprobed or analysis
    run = bare.run
    rows = run.block_operands()
    if not rows:
        raise DamagedRun(
            f"{run.folder} has no operands of matrix products, which --target {recipe.target} needs: "
            "record it again with --blocks"
        )
    known = rows, run.modules(), bare.layers, loss_curve(run)
    unseen = (run.meta.get("blocks") or {}).get("not_recorded") or ()
    found = analyze_blocks(*known, recipe, budget=budget, shards=shards, unseen=unseen)
    seen = max(int(run.meta.get("steps_seen") or 0), *(step + 1 for step in found.steps))
    plan = replace(bare.plan, blocks=found.plan)
    likelihood = any(_LIKELIHOODS.search(operation.op) for operation in run.operations())
    facts = found, {f.code for f in bare.findings}, seen, _trained(run, plan), likelihood
    before_probe, untrained = (
        replace(bare, plan=replace(plan, verdict=judge_blocks(*facts, tried)), blocks=found)
        for tried in (True, False)
    )
    # A probe is a training: the verdict that one is added to does not say that nothing was trained.
    return _probed(replace(untrained, unprobed=before_probe))


def _probed(found: Analysis) -> Analysis:
    """The analysis with the probe that is kept in its run, if that was of this very plan."""
    probe = read_probe(found.run.folder, found.plan.digest())
    return found if probe is None else found.with_probe(probe)


def _trained(run: Run, plan: PrecisionPlan) -> StoredComparison | None:
    """What a comparison in a run says of trainings by this very plan."""
    return read_comparison(run.folder, plan.digest())


def _has_gradients(layers: Layers) -> bool:
    return len(layers.of_kind("activation_grad", "weight_grad")) > 0


def _scale(
    run: Run, statistics: RunStatistics, layers: Layers, target: FloatFormat
) -> LossScaleAnalysis:
    """The loss scale, if the run is one of FP32, or of a format with FP32's range.

    What another format rounded before is gone from its record, and what the target did is no news.
    """
    half, rounded_to = run.half_precision, run.half_precision.rounded_to
    if not half.computed or rounded_to not in (None, target):
        optimizers = run.meta.get("optimizers") or ()
        hidden = clipping(run.operations()).largest
        return analyze_loss_scale(statistics, layers, target, optimizers, hidden, rounded_to)
    _, maxima, non_finite = statistics.step_maxima()
    return nothing_concluded(
        layers,
        non_finite,
        f"the recorded training computes in {half.label}",
        target,
        statistics.steps(),
        diverges=maxima.size > 0 and not np.isfinite(maxima[-1]),
        recorded_in=half.label,
    )


def _fp32_operations(run: Run) -> list[Operation]:
    """The recorded operations; those that ran in half precision do not show what rounding does."""
    return [] if run.half_precision.computed else run.operations()


def _with_operations(
    run: Run, statistics: RunStatistics, scale: LossScaleAnalysis, target: FloatFormat
) -> tuple[LossScaleAnalysis, tuple[OperationFinding, ...]]:
    """The operations that need FP32, and the loss scale of a training that keeps them there.

    If no scale fits, the modules around the layers that set the interval are tried in FP32, too.
    """
    recorded, curve = _fp32_operations(run), loss_curve(run)
    graphs, rows = split(recorded), run.modules()
    parameters = {str(row["name"]): int(row["numel"]) for row in rows if row["what"] == "parameter"}
    sizes = statistics.largest_values({op.step for op in recorded})
    found = detection.find_operations(recorded, target, scale.plan.recommended, curve, sizes)
    sites = {(f.op, f.module, f.where) for f in found if not f.covered}

    def again(*modules: str) -> LossScaleAnalysis:
        wide = fp32_gradients(
            graphs,
            parameters,
            lambda op: site(op) in sites or any(within(op.module, name) for name in modules),
        )
        if not scale.depends_on(wide):
            return scale
        rest = statistics.without_gradients(wide)
        if not _has_gradients(rest.layers()):
            return nothing_stored(scale, target)
        judged = _scale(run, rest, rest.layers(), target)
        return replace(scale if judged.void else judged, fp32_modules=modules)

    best = again()
    if not best.fits or best.out_of_reach:
        names = {str(row["name"]) for row in rows if row["what"] == "module"}
        tried = _with_modules(best, names, again)
        best = next((t for t in tried if t.fits and not t.tight and not t.out_of_reach), best)
    if best is scale:
        return scale, found
    found = detection.find_operations(recorded, target, best.plan.recommended, curve, sizes)
    inside = [f for f in found if any(within(f.module, name) for name in best.fp32_modules)]
    return best, tuple(f for f in found if f.covered or f not in inside)


MOST_MODULES = 4
"""Modules that are put into FP32 together, one after the other, until a loss scale fits."""


def _with_modules(
    scale: LossScaleAnalysis, names: Collection[str], again: Callable[..., LossScaleAnalysis]
) -> Iterator[LossScaleAnalysis]:
    """Loss scales with modules in FP32: one that holds an end of the interval, or several of one end."""
    ends = scale.ends(names)
    for module in dict.fromkeys(name for around in ends for name in around):
        yield again(module)
    for end in range(len(ends)):
        kept: tuple[str, ...] = ()
        tried = scale
        while len(kept) < MOST_MODULES:
            around = tried.ends(names)[end : end + 1]
            if not around or not around[0] or around[0][0] in kept:
                break
            kept = (*kept, around[0][0])
            tried = again(*kept)
            yield tried


def _modules_apart(scale: LossScaleAnalysis) -> tuple[Fp32Choice, ...]:
    """The modules that must stay FP32 for a loss scale to fit."""
    fits = scale_text(scale.plan.recommended)
    reason = f"no loss scale fits with it in FP16; with it in FP32, {fits} fits"
    return tuple(Fp32Choice("", module, reason) for module in scale.fp32_modules)


def _nothing_concluded(
    run: Run,
    target: FloatFormat,
    layers: Layers,
    scale: LossScaleAnalysis,
    statistics: RunStatistics,
) -> Analysis:
    """The analysis of a run that bears no conclusion: what was counted, and why it ends there."""
    findings = _findings(run, target, layers, scale, (), (), bf16=False)
    plan = PrecisionPlan(
        run=run.name,
        target=target.name,
        loss_scale=scale.plan,
        master_weights=MasterWeightsPlan(reason=f"FP32 masters are kept: {scale.void}"),
        model=run.model_fingerprint(),
        conditions=run.conditions(),
    )
    case = _case(run, target, scale, findings, statistics, plan)
    return Analysis(
        run=run,
        target=target,
        layers=layers,
        loss_scale=scale,
        formats=summarise_formats(layers, 0),
        findings=findings,
        plan=replace(plan, verdict=judge(case)),
        figures=scale.figures,
        unanswered=unanswered(case),
    )


def _findings(
    run: Run,
    target: FloatFormat,
    layers: Layers,
    scale: LossScaleAnalysis,
    modules: tuple[Fp32Choice, ...],
    operations: tuple[OperationFinding, ...],
    *,
    bf16: bool,
) -> tuple[Finding, ...]:
    """What is found; BF16 is offered where its own rules find nothing."""
    return by_severity(
        [
            *gradient_findings(layers, target, scale),
            *choice.activation_findings(layers, target, modules, bf16=bf16),
            *detection.operation_findings(operations, bf16=bf16),
            *recording_checks.rank_findings(run),
            *recording_checks.recording_findings(run, layers, scale.recorded_in),
        ]
    )


def _case(
    run: Run,
    target: FloatFormat,
    scale: LossScaleAnalysis,
    findings: tuple[Finding, ...],
    statistics: RunStatistics,
    plan: PrecisionPlan,
) -> Case:
    """What the verdict is judged by; a comparison in the run counts if it was of this very plan."""
    trained = _trained(run, plan)
    return Case(
        run=run,
        target=target,
        scale=scale,
        findings=findings,
        extent=extent_of(run, statistics.step_maxima()[0]),
        trained=trained,
        superseded=trained is None and read_comparison(run.folder) is not None,
    )
