"""Findings about gradients: missing, not finite, or outside what a loss scale can shift into range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
    from mpdiag.numerics.formats import FloatFormat


def gradient_findings(
    layers: Layers, target: FloatFormat, scale: LossScaleAnalysis
) -> list[Finding]:
    """What the recorded gradients say about training in a format.

    Args:
        layers: Merged histograms.
        target: The format to train in.
        scale: The loss scale chosen for it.
    """
    found = []
    if len(layers.of_kind("activation_grad")) == 0:
        found.append(
            Finding(
                severity="warning",
                code="no-activation-gradients",
                message="no activation gradients were recorded, so the loss scale cannot be determined",
                evidence={"layers": len(layers)},
                fix="record a loop that runs the model and the backward pass inside the recorder",
            )
        )
    h = layers.of_kind("activation_grad", "weight_grad").histograms
    bad = int(h.infs.sum() + h.nans.sum())
    if bad:
        steps = scale.non_finite_steps
        found.append(
            Finding(
                severity="error",
                code="non-finite-gradients",
                message=f"FP32 gradients were infinite or NaN in {counted(steps, 'recorded step')}: "
                "the training diverges in FP32",
                evidence={"steps": steps, "values": bad},
                fix="fix the FP32 training first; a loss scale cannot help",
            )
        )
    found += _scale_findings(target, scale)
    return found


def _scale_findings(target: FloatFormat, scale: LossScaleAnalysis) -> list[Finding]:
    plan = scale.plan
    if not scale.fits:
        return [
            Finding(
                severity="error",
                code="no-loss-scale-fits",
                message=f"no loss scale fits {target.label}: {scale.deciding_layer} needs at least "
                f"{plan.lower:g}, {scale.limiting_layer} allows at most {plan.upper:g}",
                evidence={
                    "lower": plan.lower,
                    "upper": plan.upper,
                    "layer": scale.limiting_layer,
                },
                fix=f"train in BF16, or keep {scale.limiting_layer} in FP32",
            )
        ]
    if plan.need == "not needed":
        return []
    needed = plan.need == "needed"
    return [
        Finding(
            severity="warning" if needed else "info",
            code="loss-scale-needed" if needed else "loss-scale-advisable",
            message=plan.reason,
            evidence=plan.evidence,
            fix=f"scale the loss by {plan.recommended:g} ({plan.method})",
        )
    ]
