"""FP16 or BF16 for a training that was recorded in BF16: what FP16 would need, lose and gain."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.run_statistics import read_statistics
from mpdiag.analysis.weight_updates import analyze_weight_updates
from mpdiag.display.wording import counted, percent, scale_text, spoken_layer
from mpdiag.exports.registry import export_plan
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.numerics.loss_scalers import Backoff
from mpdiag.plan import LossScalePlan, PrecisionPlan

FRAMEWORKS = ("huggingface", "lightning", "torch", "accelerate", "deepspeed", "megatron")
"""Those whose settings are given; ``mpdiag export`` knows others."""
_NAMED = {"huggingface": "Transformers", "lightning": "Lightning"}
"""Those that the text names."""


@dataclass(frozen=True)
class HalfChoice:
    """The answer to *FP16 or BF16?*, with its grounds.

    Attributes:
        answer: ``bf16``; ``either``, where FP16 fits, too; or ``unknown``.
        text: The answer as a sentence.
        grounds: What it rests on: titles and sentences.
        figures: The same in figures, see ``docs/analysis.md``.
        settings: What to set for the answer in each framework; in ``either`` for FP16.
    """

    answer: Literal["bf16", "either", "unknown"]
    text: str
    grounds: tuple[tuple[str, str], ...]
    figures: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The ``fp16_or_bf16`` of ``mpdiag analyze --json``."""
        return {
            "answer": self.answer,
            "text": self.text,
            **self.figures,
            "settings": {name: dict(values) for name, values in self.settings.items()},
        }


def fp16_or_bf16(analysis: Analysis) -> HalfChoice | None:
    """What a BF16 recording says of FP16 in its place; None of another recording or target."""
    if analysis.rounded_to is not BF16 or analysis.target is not FP16:
        return None
    scale, plan = analysis.loss_scale, analysis.plan
    modules = [c.module for c in plan.fp32_modules if c.evidence.get("overflow")]
    answer, text = _answer(analysis, len(modules))
    errors = {name: _rounding(analysis, name) for name in (BF16.name, FP16.name)}
    updates = _updates(analysis)
    bounds = scale.bounds
    figures = {
        "loss_scale": plan.loss_scale.recommended if scale.fits else None,
        "bounds": None if bounds is None else {"lower": bounds.lower, "upper": bounds.upper},
        "overflowing_modules": modules,
        "rounding": errors,
        "updates_rounded_away": updates,
    }
    chosen = _in_bf16(plan) if answer == "bf16" else plan
    settings = {} if answer == "unknown" else dict(_settings(chosen))
    grounds = (
        ("Loss scale", _scale(analysis)),
        ("Overflow", _overflow(analysis, modules)),
        ("Rounding", _rounded(errors)),
        ("Updates", _lost(updates)),
        ("Settings", _told(settings, weights=answer == "either" and bool(analysis.half.weights))),
    )
    return HalfChoice(answer, text, tuple((t, w) for t, w in grounds if w), figures, settings)


def _answer(analysis: Analysis, modules: int) -> tuple[Literal["bf16", "either", "unknown"], str]:
    scale = analysis.loss_scale
    if not scale.fits:
        return "bf16", "Stay in BF16: no loss scale fits FP16."
    if modules:
        return "bf16", f"Stay in BF16: outputs of {counted(modules, 'module')} overflow FP16."
    if scale.out_of_reach:
        return "bf16", "Stay in BF16: FP16 loses gradients at every loss scale."
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
    scale = analysis.loss_scale
    if not scale.fits or scale.bounds is None:
        return ""
    low, high = scale.bounds.lower[1], scale.bounds.upper[0]
    if low > high:
        works = "After rounding to BF16, it is open whether a scale fits without loss"
    elif low <= 1:
        works = f"Any scale up to {scale_text(high)} works"
    else:
        works = f"Any scale from {scale_text(low)} to {scale_text(high)} works"
    return f"{_needs(analysis.plan.loss_scale)}. {works}."


def _overflow(analysis: Analysis, modules: list[str]) -> str:
    """What overflows FP16: outputs, and gradients at the scale that frameworks begin with."""
    scale = analysis.loss_scale
    told = "No recorded output overflows FP16."
    if modules:
        named = ", ".join(spoken_layer(name) for name in modules[:3])
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        told = f"Outputs of {named}{more} overflow FP16. A loss scale does not help."
    if scale.bounds is None or scale.limiting_layer is None:
        return told
    top, first = scale.bounds.upper[0], Backoff().init_scale
    layer = spoken_layer(scale.limiting_layer)
    told += f" Gradients of {layer} overflow at scales above {scale_text(top)}."
    if top < first:
        told += f" GradScaler starts at {scale_text(first)}, and skips steps until it is below."
    return told


def _rounding(analysis: Analysis, fmt: str) -> float | None:
    """How far a format's rounding moves the worst layer; None where one overflows."""
    kinds = analysis.formats[fmt]["kinds"]
    errors = [kinds[k]["rounding"] for k in ("activation", "activation_grad") if k in kinds]
    return None if None in errors else max(errors, default=0.0)


def _rounded(errors: Mapping[str, float | None]) -> str:
    bf16, fp16 = errors[BF16.name], errors[FP16.name]
    if bf16 is None or fp16 is None:
        return ""
    return f"BF16 moves the worst layer's values by {percent(bf16)}, FP16 by {percent(fp16)}."


def _updates(analysis: Analysis) -> dict[str, float] | None:
    """Share of the updates that weights stored in each format would not take; None if not known."""
    if analysis.half.weights or not analysis.plan.master_weights.evidence.get("changed"):
        return None
    kept = analyze_weight_updates(read_statistics(analysis.run), BF16)
    return {
        BF16.name: kept.swallowed_fraction,
        FP16.name: analysis.plan.master_weights.swallowed_fraction,
    }


def _lost(updates: Mapping[str, float] | None) -> str:
    if updates is None:
        return "The recording does not show which updates BF16 weights rounded away."
    bf16, fp16 = percent(updates[BF16.name]), percent(updates[FP16.name])
    return (
        f"BF16 weights without masters would round away {bf16} of the updates, FP16 weights {fp16}."
    )


def _in_bf16(plan: PrecisionPlan) -> PrecisionPlan:
    """The plan of the training as it is."""
    return replace(
        plan,
        target=BF16.name,
        loss_scale=LossScalePlan(need="not needed"),
        fp32_modules=(),
        fp32_operations=(),
    )


def _settings(plan: PrecisionPlan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in FRAMEWORKS:
        yield name, export_plan(plan, name).settings


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
            words = ", ".join(f"{key}={value!r}" for key, value in plain.items())
            told.append(f"{label}: {words}.")
    if settings:
        told.append("The scaler, and others: mpdiag export PLAN --to NAME.")
    return " ".join(told)
