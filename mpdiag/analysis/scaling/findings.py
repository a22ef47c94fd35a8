"""Findings about gradients: missing, not finite, or outside what a loss scale can shift into range."""

from collections.abc import Iterator

from mpdiag.analysis.findings import Finding, error, warning
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
from mpdiag.analysis.scaling.necessity import NEEDED
from mpdiag.display.wording import counted, scale_text, spoken_layer, spoken_layers
from mpdiag.numerics.formats import FloatFormat


def gradient_findings(
    layers: Layers, target: FloatFormat, scale: LossScaleAnalysis
) -> Iterator[Finding]:
    """What the recorded gradients say about training in a format at a loss scale."""
    if len(layers.of_kind("activation_grad")) == 0:
        yield warning(
            code="no-activation-gradients",
            message="no activation gradients were recorded, so the loss scale cannot be determined",
            evidence={"layers": len(layers)},
            fix="call the model's modules and loss.backward() inside the recorder: it sees gradients "
            "where a module returns",
        )
    h = layers.of_kind("activation_grad", "weight_grad").histograms
    bad = int(h.infs.sum() + h.nans.sum())
    if bad:
        yield _non_finite(scale, bad)
    elif scale.diverges and len(h.numel):
        yield error(
            code="exploding-gradients",
            message=scale.void,
            evidence={"absmax": float(h.absmax.max(initial=0.0))},
            fix=f"fix the {scale.recorded_in} training first; no loss scale brings these gradients into "
            "range",
        )
    yield from _scale_findings(target, scale)


def _non_finite(scale: LossScaleAnalysis, values: int) -> Finding:
    """Gradients that were not finite: to the end of the recording, or in some steps of it."""
    steps = scale.non_finite_steps
    where = counted(steps, "recorded step")
    evidence = {"steps": steps, "values": values}
    found = f"{scale.recorded_in} gradients were infinite or NaN in {where}"
    if scale.diverges:
        return error(
            code="non-finite-gradients",
            message=f"{found}: the {scale.recorded_in} training diverges",
            evidence=evidence,
            fix=f"fix the {scale.recorded_in} training first; a loss scale cannot help",
        )
    return warning(
        code="non-finite-steps",
        message=f"{found}, and finite again in later ones",
        evidence=evidence,
        fix="find the cause; a training by the plan skips these steps",
    )


def _scale_findings(target: FloatFormat, scale: LossScaleAnalysis) -> Iterator[Finding]:
    plan = scale.plan
    if not scale.fits:
        yield error(
            code="no-loss-scale-fits",
            message=f"no loss scale fits {target.label}: {_lower_end(scale)} needs at least "
            f"{scale_text(plan.lower)}, but {spoken_layer(scale.limiting_layer)} overflows above "
            f"{scale_text(plan.upper)}",
            evidence={"lower": plan.lower, "upper": plan.upper, "layer": scale.limiting_layer},
            fix=f"train in BF16, or keep the module of {spoken_layer(scale.limiting_layer)} in FP32",
        )
        return
    if scale.fp32_modules:
        modules = spoken_layers(scale.fp32_modules)
        yield warning(
            code="no-loss-scale-fits",
            message=f"no loss scale fits if all modules run in {target.label}; with {modules} in FP32, "
            f"{scale_text(plan.recommended)} fits",
            evidence={"lower": plan.lower, "upper": plan.upper, "modules": [*scale.fp32_modules]},
            fix=f"keep {modules} in FP32 (the plan does)",
        )
    if scale.out_of_reach:
        yield _out_of_reach(target, scale)
    if scale.tight:
        yield _tight(scale)
    elif plan.need in ("needed", "advisable"):
        yield Finding(
            severity="warning" if plan.need == "needed" else "info",
            code="loss-scale-needed" if plan.need == "needed" else "loss-scale-advisable",
            message=_without(scale),
            evidence=plan.evidence,
            fix=f"scale the loss by {scale_text(plan.recommended)} ({plan.method})",
        )


def _without(scale: LossScaleAnalysis) -> str:
    """What is lost without a scale, and what is left of it at the plan's; the rest is its reason."""
    told, figures = scale.plan.reason.partition("; ")[0], scale.figures
    unscaled, scaled = (
        figures.find(key, scale.deciding_layer) for key in ("layer-sum", "layer-sum-scaled")
    )
    over = figures.find("overflowing-unscaled")
    if unscaled is None or scaled is None or figures.find("all-weights-sum") is not None:
        return told
    if over is not None and over.count:
        return told
    by_values = scale.plan.need == "needed" and unscaled.value < NEEDED
    of = " of the sum" if by_values else ""  # of what, where the values come first
    return f"{told}; {scaled.at_scale}, it loses {scaled.said}{of}"


def _out_of_reach(target: FloatFormat, scale: LossScaleAnalysis) -> Finding:
    """Layers whose gradients are below the format's range at every admissible scale."""
    layers = spoken_layers(sorted(scale.out_of_reach))
    return warning(
        code="loss-scale-tight",
        message=f"{target.label} loses the gradient of {layers} at every loss scale up to "
        f"{scale_text(scale.plan.upper)}, as much as without one",
        evidence={"layers": sorted(scale.out_of_reach), "upper": scale.plan.upper},
        fix="if they must train, keep them in FP32, or train in BF16",
    )


def _tight(scale: LossScaleAnalysis) -> Finding:
    """The largest admissible scale loses what may matter."""
    plan = scale.plan
    return warning(
        code="loss-scale-tight",
        message=f"{_lower_end(scale)} needs a loss scale of {scale_text(plan.lower)}, but "
        f"{spoken_layer(scale.limiting_layer)} overflows above {scale_text(plan.upper)}; in our "
        f"reference trainings, losing as much as at {scale_text(plan.upper)} did no harm",
        evidence={"lower": plan.lower, "upper": plan.upper, "layer": scale.limiting_layer},
        fix=f"scale the loss by {scale_text(plan.recommended)} ({plan.method}), or train in BF16",
    )


def _lower_end(scale: LossScaleAnalysis) -> str:
    """The layer that sets the smallest scale, and when."""
    found = scale.figures.find("scale-lower")
    return spoken_layer(scale.deciding_layer) if found is None else spoken_layer(found.layer)
