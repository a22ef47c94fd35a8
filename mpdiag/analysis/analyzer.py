"""``analyze``: from a run folder to findings and a plan. Tensors are never seen, only histograms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.findings import Finding
from mpdiag.analysis.format_advice import advise_layers, summarise_formats
from mpdiag.analysis.guidance import advise_levels
from mpdiag.analysis.notebook import analysis_html
from mpdiag.analysis.operations.choice import (
    CLOSE,
    choose_fp32_operations,
    proven_modules,
    proven_operations,
)
from mpdiag.analysis.operations.search import find_operations
from mpdiag.analysis.ranks import about_ranks
from mpdiag.analysis.reduction import choose_reduction
from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis, analyze_loss_scale
from mpdiag.analysis.shapes import advise_shapes, shape_findings
from mpdiag.analysis.streaming import evidence_of
from mpdiag.analysis.weight_updates import analyze_weight_updates
from mpdiag.display.wording import counted
from mpdiag.errors import DamagedRun
from mpdiag.numerics.formats import FP16, FloatFormat, format_named, half_of
from mpdiag.plan import Fp32Choice, LossScalePlan, PrecisionPlan
from mpdiag.runs.run import Run, open_run

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.operations.rules import OperationFinding

SCHEMA_VERSION = 1
FEW_STEPS = 20


@dataclass(frozen=True, eq=False)
class Analysis:
    """What a run says about a target format.

    Attributes:
        run: The run.
        target: The format.
        layers: Histograms by kind and name.
        loss_scale: The loss scale and what it rests on.
        formats: Shares lost in every format.
        findings: Most severe first.
        plan: Every decision.
        operations: Operations that need FP32, by their recorded numbers, those the operation policy
            does not cover first; empty where none need it, or none were recorded.
    """

    run: Run
    target: FloatFormat
    layers: Layers
    loss_scale: LossScaleAnalysis
    formats: Mapping[str, Any]
    findings: tuple[Finding, ...]
    plan: PrecisionPlan
    operations: tuple[OperationFinding, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence."""
        return self.plan.verdict

    def __repr__(self) -> str:
        counts = [sum(f.severity == s for f in self.findings) for s in ("error", "warning", "info")]
        return (
            f"<Analysis of {str(self.run.folder)!r} for {self.target.label}: {self.verdict} "
            f"{counts[0]} errors, {counts[1]} warnings, {counts[2]} notes>"
        )

    def _repr_html_(self) -> str:
        """The verdict, its findings and the plan in a notebook."""
        return analysis_html(self.run.name, self.target.label, self.findings, self.plan)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag analyze --json``."""
        masters = self.plan.master_weights
        return {
            "schema_version": SCHEMA_VERSION,
            "run": str(self.run.folder),
            "target": self.target.name,
            "verdict": self.verdict,
            "loss_scale": self.loss_scale.to_json(),
            "master_weights": {
                "needed": masters.needed,
                "swallowed_fraction": masters.swallowed_fraction,
                "worst_parameter": masters.worst_parameter,
                "reason": masters.reason,
                "evidence": dict(masters.evidence),
            },
            "fp32_operations": [
                {"op": c.op, "module": c.module, "reason": c.reason, "evidence": dict(c.evidence)}
                for c in self.plan.fp32_operations
            ],
            "formats": dict(self.formats),
            "layers": self.layers.to_json(),
            "findings": [f.to_json() for f in self.findings],
            "plan": self.plan.to_json(),
        }


def analyze(run: str | os.PathLike[str] | Run, target: str = FP16.name) -> Analysis:
    """Analyze a recorded run.

    Args:
        run: A run folder, or an opened run.
        target: The format to train in: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.

    Raises:
        InputError: If the run is missing, damaged, empty, of a newer schema, or nothing but NaN.
        ValueError: If there is no such format.
    """
    opened = run if isinstance(run, Run) else open_run(Path(run))
    fmt = format_named(target)
    evidence = evidence_of(opened)
    layers = evidence.layers()
    _refuse_no_numbers(opened, layers)
    gradient_format = half_of(fmt)
    scale = analyze_loss_scale(evidence, layers, gradient_format)
    masters = analyze_weight_updates(evidence, fmt)
    by_kind = choose_fp32_operations(layers, opened.modules(), gradient_format)
    recorded = opened.operations()
    proven = find_operations(recorded, gradient_format, scale.plan.recommended)
    modules = tuple(c for c in by_kind if c.evidence.get("overflow"))
    operations = by_kind
    if recorded:
        modules = proven_modules(by_kind, proven)
        operations = (*modules, *proven_operations(proven))
    exponent = int(np.log2(scale.plan.recommended))
    findings = _findings(opened, fmt, layers, scale, modules, proven)
    plan = PrecisionPlan(
        run=opened.name,
        verdict=_verdict(fmt, scale, modules, findings),
        target=fmt.name,
        level="O1",
        loss_scale=scale.plan,
        master_weights=masters,
        fp32_operations=operations,
        fp32_modules=modules,
        reduction=choose_reduction(
            layers, scale.plan.recommended, int(opened.meta.get("world_size") or 1)
        ),
        levels=advise_levels(opened, evidence, masters),
        shapes=advise_shapes(opened, fmt.name),
        layer_formats=advise_layers(layers, exponent),
    )
    formats = summarise_formats(layers, exponent)
    return Analysis(opened, fmt, layers, scale, formats, findings, plan, proven)


def _refuse_no_numbers(run: Run, layers: Layers) -> None:
    """Where no gradient was ever finite there is nothing to analyze."""
    h = layers.of_kind("activation_grad", "weight_grad").histograms
    if h.numel.sum() > 0 and h.finite.sum() == 0:
        message = (
            f"{run.folder} holds no gradient but NaN and infinity: the FP32 training diverged before "
            "its first recorded step; mend it and record again"
        )
        raise DamagedRun(message)


def _findings(
    run: Run,
    target: FloatFormat,
    layers: Layers,
    scale: LossScaleAnalysis,
    modules: tuple[Fp32Choice, ...],
    operations: tuple[OperationFinding, ...],
) -> tuple[Finding, ...]:
    found = [
        *_about_gradients(layers, target, scale),
        *_about_activations(layers, target, modules),
        *_about_operations(operations),
        *_about_recording(run, layers),
        *shape_findings(run, target.name),
    ]
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda f: order[f.severity]))


def _about_gradients(
    layers: Layers, target: FloatFormat, scale: LossScaleAnalysis
) -> list[Finding]:
    plan: LossScalePlan = scale.plan
    found = []
    if len(layers.of_kind("activation_grad")) == 0:
        found.append(
            Finding(
                "warning",
                "no-activation-gradients",
                "no activation gradient was recorded, so nothing is known about the loss scale",
                {"layers": len(layers)},
                "record a loop that calls the model and runs backward inside the recorder",
            )
        )
    h = layers.of_kind("activation_grad", "weight_grad").histograms
    bad = int(h.infs.sum() + h.nans.sum())
    if bad:
        found.append(
            Finding(
                "error",
                "non-finite-gradients",
                f"FP32 gradients were infinite or NaN in {scale.non_finite_steps} recorded steps: "
                "the model diverges by itself",
                {"steps": scale.non_finite_steps, "values": bad},
                "mend the FP32 training first; no loss scale helps against this",
            )
        )
    if not scale.fits:
        found.append(
            Finding(
                "error",
                "no-loss-scale-fits",
                f"no loss scale fits {target.label}: {scale.deciding_layer} needs at least "
                f"{plan.lower:g}, {scale.limiting_layer} allows at most {plan.upper:g}",
                {"lower": plan.lower, "upper": plan.upper, "layer": scale.limiting_layer},
                f"train in BF16, or keep {scale.limiting_layer} in FP32",
            )
        )
    elif plan.need == "needed":
        found.append(
            Finding(
                "warning",
                "loss-scale-needed",
                plan.reason,
                plan.evidence,
                f"scale the loss by {plan.recommended:g} ({plan.method})",
            )
        )
    elif plan.need == "advisable":
        found.append(
            Finding(
                "info",
                "loss-scale-advisable",
                plan.reason,
                plan.evidence,
                f"scale the loss by {plan.recommended:g} ({plan.method})",
            )
        )
    return found


def _about_activations(
    layers: Layers, target: FloatFormat, operations: tuple[Fp32Choice, ...]
) -> list[Finding]:
    found = []
    activations = layers.of_kind("activation")
    h = activations.histograms
    named = {c.module: c for c in operations if c.evidence.get("overflow")}
    if named:
        worst = max(named.values(), key=lambda c: float(c.evidence["absmax"]))
        found.append(
            Finding(
                "error",
                "activation-overflow",
                f"{len(named)} modules put out values past {target.label}'s range, most of all "
                f"{worst.module or 'the model'} with {worst.evidence['absmax']:.3g}",
                {"modules": sorted(named), "absmax": worst.evidence["absmax"]},
                "keep these in FP32 (the plan does), or train in BF16; no loss scale helps",
            )
        )
    close = [
        (str(name), float(top))
        for name, top in zip(activations.names, h.absmax, strict=True)
        if target.max / CLOSE <= top and not target.overflows(float(top))
    ]
    if close:
        name, top = max(close, key=lambda item: item[1])
        found.append(
            Finding(
                "warning",
                "activation-close-to-overflow",
                f"the output of {name or 'the model'} reaches {top:.3g}, within {CLOSE:g}× of "
                f"{target.label}'s largest value",
                {"modules": [n for n, _ in close], "absmax": top},
                "watch it: a longer training may overflow there; FP32 or BF16 for it is safe",
            )
        )
    return found


def _about_operations(operations: tuple[OperationFinding, ...]) -> list[Finding]:
    """One finding for each rule and line that the operation policy does not cover."""
    found: dict[tuple[str, str, str], Finding] = {}
    for f in operations:
        if f.covered:
            continue
        at = f" at {f.where}" if f.where and f.where != f.place else ""
        found.setdefault(
            (f.code, str(f.evidence.get("subtraction") or f.where), f.reason),
            Finding(
                "warning" if f.code in ("cancellation", "swallowed") else "error",
                f"operation-{f.code}",
                f"{f.op} in {f.place}{at}: {f.reason}",
                {**f.evidence, "line": f.where, "code": f.text},
                f"{f.fix}; without it {f.without}",
            ),
        )
    return list(found.values())


def _about_the_loop(run: Run, layers: Layers) -> list[Finding]:
    """What was recorded is no FP32 training as it should be."""
    found = []
    seen = int(run.meta.get("steps_seen") or 0)
    stepped = len(layers.of_kind("update")) > 0
    if run.meta.get("optimizers") and len(layers) and seen <= 1 and not stepped:
        found.append(
            Finding(
                "warning",
                "no-optimizer-step",
                "no step of the optimizer was seen, so all that was recorded counts as one step",
                {"steps_seen": seen},
                "call optimizer.step() after backward(), and record again",
            )
        )
    weights = {str(row["dtype"]) for row in run.modules() if row["what"] == "parameter"}
    if weights and "float32" not in weights:
        kinds = " and ".join(sorted(weights))
        found.append(
            Finding(
                "warning",
                "not-fp32",
                f"the weights are {kinds}: this is no recording of an FP32 training, and what "
                f"{kinds} has rounded away or would need beyond FP32 cannot be seen in it",
                {"dtypes": sorted(weights)},
                "record the model in FP32: model.float()",
            )
        )
    return found


def _about_recording(run: Run, layers: Layers) -> list[Finding]:
    found = [*about_ranks(run), *_about_the_loop(run, layers)]
    steps = int(run.meta.get("steps_recorded") or 0)
    if 0 < steps < FEW_STEPS:
        found.append(
            Finding(
                "info",
                "few-steps",
                f"this rests on {counted(steps, 'recorded step')}",
                {"steps_recorded": steps},
                "record some hundred steps: gradients shrink as training goes on",
            )
        )
    failures = run.meta.get("failures") or []
    if failures:
        found.append(
            Finding(
                "warning",
                "recording-failed",
                f"recording failed {len(failures)} times, first in {failures[0].get('where')}",
                {"failures": failures},
                "the record is incomplete: see the evidence, and record again",
            )
        )
    coverage = run.meta.get("coverage") or {}
    missing = [
        item
        for item in coverage.get("not_recorded") or []
        if item.get("what") == "module" and "compiled" in str(item.get("reason"))
    ]
    if missing:
        found.append(
            Finding(
                "warning",
                "modules-not-recorded",
                f"{len(missing)} modules ran compiled and were not recorded",
                {"modules": [item.get("name") for item in missing]},
                "record the eager model, then compile it",
            )
        )
    return found


def _verdict(
    target: FloatFormat,
    scale: LossScaleAnalysis,
    modules: tuple[Fp32Choice, ...],
    findings: tuple[Finding, ...],
) -> str:
    codes = {f.code for f in findings}
    if "non-finite-gradients" in codes:
        return "This training diverges in FP32 already; mend that before changing the format."
    if "no-activation-gradients" in codes:
        return "No gradient was recorded: nothing can be said about mixed precision."
    if not scale.fits:
        return f"This cannot train in {target.label} with any loss scale; use BF16."
    overflowing = len(modules)
    rest = f", with {counted(overflowing, 'overflowing module')} in FP32" if overflowing else ""
    lines = sum(f.code.startswith("operation-") for f in findings)
    if lines:
        code = counted(lines, "line of code", "lines of code")
        rest += f"{' and' if rest else ', with'} {code} in FP32 or written otherwise"
    plan = scale.plan
    if plan.need == "needed":
        return (
            f"This can train in {target.label} with a loss scale of {plan.recommended:g}{rest}; "
            "without one it would suffer."
        )
    if plan.need == "advisable":
        return (
            f"This can train in {target.label}{rest}; a loss scale of {plan.recommended:g} is a "
            "harmless insurance."
        )
    if plan.method != "none":
        return (
            f"This can train in {target.label}{rest}; its gradients come close to {target.label}'s "
            f"largest value, and a loss scale of {plan.recommended:g} leaves them room."
        )
    return f"This can train in {target.label}{rest}; it needs no loss scale."
