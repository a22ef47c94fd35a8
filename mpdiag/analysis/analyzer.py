"""``analyze``: from a run folder to findings and a plan, by histograms alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.findings import by_severity
from mpdiag.analysis.format_advice import advise_layers, summarise_formats
from mpdiag.analysis.level_advice import advise_levels
from mpdiag.analysis.notebook import analysis_html
from mpdiag.analysis.operations.choice import (
    activation_findings,
    choose_fp32_operations,
    proven_modules,
    proven_operations,
)
from mpdiag.analysis.operations.detection import find_operations, operation_findings
from mpdiag.analysis.rank_checks import rank_findings
from mpdiag.analysis.recording_checks import (
    period_findings,
    recording_findings,
    require_finite_gradients,
)
from mpdiag.analysis.reduction import choose_reduction
from mpdiag.analysis.scaling.findings import gradient_findings
from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis, analyze_loss_scale
from mpdiag.analysis.shapes import advise_shapes, shape_findings
from mpdiag.analysis.streaming import read_statistics
from mpdiag.analysis.weight_updates import analyze_weight_updates
from mpdiag.display.wording import counted
from mpdiag.numerics.formats import FP16, FloatFormat, format_named, half_of
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import Run, open_run

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from mpdiag.analysis.findings import Finding
    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.operations.rules import OperationFinding
    from mpdiag.plan import Fp32Choice

SCHEMA_VERSION = 1


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
        """The plan's verdict, in one sentence."""
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
        InputError: If the run is missing, damaged, empty, of a newer schema, or has only NaN gradients.
        ValueError: If there is no such format.
    """
    opened = run if isinstance(run, Run) else open_run(Path(run))
    fmt = format_named(target)
    statistics = read_statistics(opened)
    layers = statistics.layers()
    require_finite_gradients(opened, layers)
    gradient_format = half_of(fmt)
    scale = analyze_loss_scale(statistics, layers, gradient_format)
    masters = analyze_weight_updates(statistics, fmt)
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
    findings = by_severity([*findings, *period_findings(opened, statistics.steps().tolist())])
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
        levels=advise_levels(opened, statistics, masters),
        shapes=advise_shapes(opened, fmt.name),
        layer_formats=advise_layers(layers, exponent),
        model=opened.model_fingerprint(),
    )
    formats = summarise_formats(layers, exponent)
    return Analysis(opened, fmt, layers, scale, formats, findings, plan, proven)


def _findings(
    run: Run,
    target: FloatFormat,
    layers: Layers,
    scale: LossScaleAnalysis,
    modules: tuple[Fp32Choice, ...],
    operations: tuple[OperationFinding, ...],
) -> tuple[Finding, ...]:
    return by_severity(
        [
            *gradient_findings(layers, target, scale),
            *activation_findings(layers, target, modules),
            *operation_findings(operations),
            *rank_findings(run),
            *recording_findings(run, layers),
            *shape_findings(run, target.name),
        ]
    )


def _verdict(
    target: FloatFormat,
    scale: LossScaleAnalysis,
    modules: tuple[Fp32Choice, ...],
    findings: tuple[Finding, ...],
) -> str:
    codes = {f.code for f in findings}
    if "non-finite-gradients" in codes:
        return "This training already diverges in FP32; fix that before changing the format."
    if "no-activation-gradients" in codes:
        return "No gradients were recorded, so mixed precision cannot be assessed."
    if not scale.fits:
        return f"This cannot train in {target.label} with any loss scale; use BF16."
    overflowing = len(modules)
    rest = f", with {counted(overflowing, 'overflowing module')} in FP32" if overflowing else ""
    lines = sum(f.code.startswith("operation-") for f in findings)
    if lines:
        code = counted(lines, "line of code", "lines of code")
        rest += f"{' and' if rest else ', with'} {code} kept in FP32 or rewritten"
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
