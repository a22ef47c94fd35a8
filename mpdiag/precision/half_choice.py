"""FP16 or BF16 for a training that was recorded in BF16: what FP16 would need, lose and gain."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.run_statistics import read_statistics
from mpdiag.analysis.weight_updates import analyze_weight_updates
from mpdiag.display.wording import counted, percent, scale_text, spoken_layer, spoken_layers
from mpdiag.exports.registry import export_plan
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.numerics.loss_scalers import Backoff
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.precision.movement import standstill
from mpdiag.runs.precision import HALF
from mpdiag.runs.run import Run

Chosen = Literal["bf16", "either", "unknown"]
FRAMEWORKS = ("huggingface", "lightning", "torch", "accelerate", "deepspeed", "megatron")
"""Those whose settings are given; ``mpdiag export`` knows others."""
_NAMED = {"huggingface": "Transformers", "lightning": "Lightning"}
"""Those that the text names."""


@dataclass(frozen=True)
class HalfChoice:
    """The answer to *FP16 or BF16?*, with its grounds.

    Attributes:
        answer: ``bf16``; ``either``, where FP16 fits, too; or ``unknown``.
        text: The answer in sentences.
        grounds: What it rests on: sentences by title.
        updates_rounded_away: Share of the updates that weights stored in each format would not take;
            None where the weights are in half precision already.
        settings: What to set for the answer, by framework; for ``either`` it is FP16.
    """

    answer: Chosen
    text: str
    grounds: Mapping[str, str]
    updates_rounded_away: Mapping[str, float] | None
    settings: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The ``fp16_or_bf16`` of ``mpdiag analyze --json``."""
        return dict(vars(self))


def fp16_or_bf16(analysis: Analysis) -> HalfChoice | None:
    """What a BF16 recording says of FP16 in its place; None of another recording or target."""
    if analysis.rounded_to is not BF16 or analysis.target is not FP16:
        return None
    plan = analysis.plan
    overflowing = [c.module for c in plan.fp32_modules if c.evidence.get("overflow")]
    answer, text = _answer(analysis, len(overflowing))
    chosen = _in_bf16(plan) if answer == "bf16" else plan
    known = () if answer == "unknown" else FRAMEWORKS
    settings = {name: export_plan(chosen, name).settings for name in known}
    weights = bool(analysis.run.half_precision.weights)
    updates = None if weights else _updates(analysis)
    grounds = {
        "Loss scale": _scale(analysis),
        "Overflow": _overflow(analysis, overflowing),
        "Rounding": _rounding(analysis),
        "Updates": _unmoved(analysis.run) if updates is None else _lost(updates),
        "Settings": _told(settings, weights=weights and answer == "either"),
    }
    return HalfChoice(answer, text, {t: w for t, w in grounds.items() if w}, updates, settings)


def _answer(analysis: Analysis, overflowing: int) -> tuple[Chosen, str]:
    scale = analysis.loss_scale
    why = "no loss scale fits FP16" if not scale.fits else ""
    if overflowing:
        why = why or f"outputs of {counted(overflowing, 'module')} overflow FP16"
    if scale.out_of_reach:
        why = why or "FP16 loses gradients at every loss scale"
    if why:
        return "bf16", f"Stay in BF16: {why}."
    if analysis.verdict.level == "cannot":
        return "unknown", "The recording does not show whether FP16 works."
    needs = _needs(analysis.plan.loss_scale)
    return "either", f"Both should work. {needs}, and keeps 11 bits of a value. BF16 keeps 8."


def _needs(plan: LossScalePlan) -> str:
    """The loss scale that FP16 needs, in a clause."""
    if plan.need == "not needed":
        return "FP16 needs no loss scale"
    verb = "needs" if plan.need == "needed" else "should have"
    return f"FP16 {verb} a loss scale of {scale_text(plan.recommended)}"


def _scale(analysis: Analysis) -> str:
    """The loss scale that FP16 needs, with the scales that are certain to work."""
    bounds = analysis.loss_scale.bounds
    if not analysis.loss_scale.fits or bounds is None:
        return ""
    low, high = bounds.lower[1], bounds.upper[0]
    works = (
        f"Any scale {f'from {scale_text(low)} ' if low > 1 else ''}up to {scale_text(high)} works"
    )
    if low > high:
        works = "After rounding to BF16, it is open whether a scale fits without loss"
    return f"{_needs(analysis.plan.loss_scale)}. {works}."


def _overflow(analysis: Analysis, modules: list[str]) -> str:
    """What overflows FP16: outputs, and gradients at the scale that frameworks begin with."""
    scale, told = analysis.loss_scale, "No recorded output overflows FP16."
    if modules:
        told = f"Outputs of {spoken_layers(modules)} overflow FP16. A loss scale does not help."
    if scale.bounds is not None:
        top, first = scale.bounds.upper[0], Backoff().init_scale
        layer = spoken_layer(scale.limiting_layer)
        told += f" Gradients of {layer} overflow at scales above {scale_text(top)}."
        if top < first:
            told += f" GradScaler starts at {scale_text(first)}, and skips steps until it is below."
    return told


def _rounding(analysis: Analysis) -> str:
    """How far rounding moves the worst layer; empty where one overflows."""
    told = []
    for fmt in (BF16, FP16):
        kinds = analysis.formats[fmt.name]["kinds"]
        errors = [kinds[k]["rounding"] for k in ("activation", "activation_grad") if k in kinds]
        if None in errors:
            return ""
        told.append(percent(max(errors, default=0.0)))
    return f"BF16 moves the worst layer's values by {told[0]}, FP16 by {told[1]}."


def _updates(analysis: Analysis) -> dict[str, float]:
    in_bf16 = analyze_weight_updates(read_statistics(analysis.run), BF16)
    masters = (in_bf16, analysis.plan.master_weights)
    return {f.name: m.swallowed_fraction for f, m in zip((BF16, FP16), masters, strict=True)}


def _lost(updates: Mapping[str, float]) -> str:
    bf16, fp16 = percent(updates[BF16.name]), percent(updates[FP16.name])
    return (
        f"BF16 weights without masters would round away {bf16} of the updates, FP16 weights {fp16}."
    )


def _unmoved(run: Run) -> str:
    """How many weights in half precision stood still."""
    facts = run.readable_precision
    stored = () if facts is None else facts.parameters
    seen = standstill(run, {p.name for p in stored if p.stored in HALF and p.master is None})
    if not seen.elements:
        return ""
    return f"At least {percent(seen.share)} of the weights with a gradient did not move in a step."


def _in_bf16(plan: PrecisionPlan) -> PrecisionPlan:
    """The plan of the training as it is."""
    return replace(
        plan, target=BF16.name, loss_scale=LossScalePlan(), fp32_modules=(), fp32_operations=()
    )


def _told(settings: Mapping[str, Mapping[str, Any]], *, weights: bool) -> str:
    """The settings that are plain values, of the frameworks that the text names.

    Args:
        settings: By framework.
        weights: Whether the weights must be FP32, and are not.
    """
    told = ["Load the weights in FP32."] if weights else []
    for name, label in _NAMED.items():
        plain = {k: v for k, v in settings.get(name, {}).items() if not isinstance(v, dict)}
        if plain:
            told.append(f"{label}: {', '.join(f'{k}={v!r}' for k, v in plain.items())}.")
    if settings:
        told.append("The scaler, and others: mpdiag export PLAN --to NAME.")
    return " ".join(told)
