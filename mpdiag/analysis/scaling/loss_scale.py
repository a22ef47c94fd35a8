"""The loss scale: the interval that is admissible, what is lost without one, and the choice.

A scale S is admissible when S·max|g| stays below FP16's largest value over every recorded gradient,
and sufficient when what stays below FP16's range no longer matters. What "matters" is calibrated
against trainings that were run both ways, see ``NEEDED``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.scaling.maxima import headroom, overflow_rate
from mpdiag.analysis.scaling.method import (
    LARGEST_SCALE,
    TOLERATED_SKIPS,
    choose_method,
    course_of,
    describe_choice,
)
from mpdiag.numerics.formats import FP16, FloatFormat
from mpdiag.plan import LossScalePlan, Need

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.analysis.run_statistics import RunStatistics

NEEDED = 0.25
"""Share of Σ|g| that the worst layer loses, late in training, from which a scale is *needed*.

Emulated FP16 trainings on real data, each against its FP32 twin: harmless at 0.0001 (digits CNN),
0.03 (LSTM language model) and 0.16 (denoiser on photographs, which loses 30 % of all its values);
ruinous at 0.29 (Multibox SSD, average precision .85 → .17) and 0.59 (the denoiser at full size).
Counting values alone would rank the harmless denoiser beside the detector that fails.
"""
NEEDED_VALUES, NEEDED_SUM = 0.75, 0.05
"""Shares of a layer's values and of its Σ|g| that, lost *together*, make a scale needed, too.

Where nearly all values are lost, and still weigh something, they are many small pushes in one
direction, which nothing left over makes up for: the softmax of a language model over 8,000 words
loses 90 % of its values but 7 % of their sum, and its perplexity went from 311 to 549. The denoiser
that took no harm loses 48 % and 16 %; a language model over 6,000 words that took none, 93 % and 3 %.
"""
MATTERS = 0.01
"""Share of Σ|g| in the worst layer below which what is lost no longer matters; from there up to
``NEEDED`` a scale is advised as a harmless insurance, and not called needed."""
NEGLIGIBLE = 0.001
"""The share the recommended scale aims at, where the interval has room."""
LARGEST_EXPONENT = int(math.log2(LARGEST_SCALE))


@dataclass(frozen=True)
class LossScaleAnalysis:
    """Everything known about the loss scale.

    Attributes:
        plan: The decision.
        limiting_layer: The layer with the largest gradient, which limits the upper end.
        deciding_layer: The layer that loses most, which sets the lower end.
        underflow_before: Share of non-zero activation gradients lost at scale 1, over all layers.
        underflow_after: The same at the recommended scale.
        predicted_overflow_rate: Expected share of steps that overflow at the recommended scale.
        worst_before: Share of Σ|g| the deciding layer loses at scale 1, late in training.
        non_finite_steps: Steps whose FP32 gradients were infinite or NaN already.
        fits: Whether any scale is both admissible and sufficient.
        late: Activation gradients of the later half of the recorded steps, which decide.
    """

    plan: LossScalePlan
    limiting_layer: str | None
    deciding_layer: str | None
    underflow_before: float
    underflow_after: float
    predicted_overflow_rate: float
    worst_before: float
    non_finite_steps: int
    fits: bool
    late: Layers

    def to_json(self) -> dict[str, Any]:
        """The ``loss_scale`` of ``mpdiag analyze --json``."""
        p = self.plan
        return {
            "needed": p.needed,
            "need": p.need,
            "recommended": p.recommended,
            "lower": p.lower,
            "upper": p.upper,
            "method": p.method,
            "init_scale": p.init_scale,
            "growth_interval": p.growth_interval,
            "limiting_layer": self.limiting_layer,
            "deciding_layer": self.deciding_layer,
            "underflow_before": self.underflow_before,
            "underflow_after": self.underflow_after,
            "predicted_overflow_rate": self.predicted_overflow_rate,
            "fits": self.fits,
            "reason": p.reason,
            "evidence": dict(p.evidence),
        }


def analyze_loss_scale(
    evidence: RunStatistics, layers: Layers, target: FloatFormat = FP16
) -> LossScaleAnalysis:
    """Decide on a loss scale from recorded gradients.

    Args:
        evidence: The run's rows.
        layers: The same, merged.
        target: The format gradients would be stored in.
    """
    gradients = layers.of_kind("activation_grad", "weight_grad")
    steps, maxima, non_finite = evidence.step_maxima()
    finite = maxima[np.isfinite(maxima) & (maxima > 0)]
    if len(gradients) == 0 or finite.size == 0:
        return LossScaleAnalysis(
            LossScalePlan(reason="no finite gradient was recorded"),
            *(None, None, 0.0, 0.0, 0.0, 0.0, non_finite, True),
            late=layers.of_kind("activation_grad"),
        )
    largest = gradients.histograms.absmax
    top = int(np.argmax(largest))
    upper_exponent = math.ceil(math.log2(target.max / float(largest[top]))) - 1
    if math.ldexp(float(largest[top]), upper_exponent + 1) < target.max:
        upper_exponent += 1

    late = evidence.late_gradients(float(np.median(steps)))
    losses = lost_by_scale(late, target)
    worst_before = float(losses[:, 0].max(initial=0.0))
    deciding = late.names[int(np.argmax(losses[:, 0]))] if len(late) else None
    lower_exponent = _first_below(losses, MATTERS)
    room, drift, spread = headroom(finite)

    values = values_lost(late, target)
    crowded = _worst_crowd(values, losses[:, 0])
    need: Need = "not needed"
    if needs_scale(values, losses[:, 0]):
        need = "needed"
        if worst_before < NEEDED and crowded is not None:
            deciding, worst_before = late.names[crowded], float(losses[crowded, 0])
    elif worst_before >= MATTERS:
        need = "advisable"
    exponent = 0
    if need != "not needed":
        exponent = max(_first_below(losses, NEGLIGIBLE), lower_exponent)
    safe = upper_exponent - room
    exponent = min(exponent, max(safe, lower_exponent), upper_exponent)
    # The worst layer without a scale, and the worst with it: either may decide.
    worst = {int(np.argmax(losses[:, max(0, k)])) for k in (0, exponent)} if len(late) else set()
    course = course_of(
        steps,
        maxima,
        evidence.by_step([str(late.names[i]) for i in sorted(worst)], steps),
        target,
        MATTERS,
        sink=max(0, math.ceil(-drift)) if need != "not needed" else 0,
    )
    # "none" would not even check for the infinities that this training makes by itself.
    scaled = need != "not needed" or non_finite > 0
    chosen, judged = choose_method(course, exponent, safe, upper_exponent, room, scaled)
    exponent = int(math.log2(chosen.scale))
    adapts = chosen.method in ("backoff", "lognormal")
    rate = chosen.skipped if adapts else overflow_rate(finite, exponent, target, drift)

    everything = layers.of_kind("activation_grad").histograms
    nonzero = everything.nonzero.sum()
    before = float(share(everything.lost_to_zero(target).value.sum(), nonzero))
    after = float(share(everything.lost_to_zero(target, exponent).value.sum(), nonzero))
    scale, lower, upper = (math.ldexp(1.0, e) for e in (exponent, lower_exponent, upper_exponent))
    steps_between = int(np.median(np.diff(steps))) if steps.size > 1 else 1
    crowd = float(values[crowded]) if crowded is not None and worst_before < NEEDED else None
    plan = LossScalePlan(
        need=need,
        method=chosen.method,
        recommended=scale,
        lower=lower,
        upper=upper,
        init_scale=scale,
        growth_interval=chosen.growth_interval or 2000,
        # A scale that adapts may outgrow what the largest recorded gradient allows, once those
        # shrink; it backs off again when they do not.
        max_scale=LARGEST_SCALE
        if adapts
        else max(scale, math.ldexp(1.0, min(LARGEST_EXPONENT, upper_exponent))),
        min_scale=min(1.0, scale),
        reason=f"{_reason(need, str(deciding or ''), worst_before, before, target, crowd)}; "
        + describe_choice(chosen, judged),
        evidence={
            "worst_layer": deciding,
            "worst_layer_sum_lost": worst_before,
            "threshold_needed": NEEDED,
            "threshold_matters": MATTERS,
            "underflow_before": before,
            "underflow_after": after,
            "absmax": float(largest[top]),
            "absmax_layer": gradients.names[top],
            "predicted_overflow_rate": rate,
            **_weight_gradients(layers, exponent, target),
            "headroom_exponents": room,
            "maxima_drift_exponents": drift,
            "maxima_spread_exponents": spread,
            "steps": int(steps.size),
            "median_steps_between_recordings": steps_between,
            "tolerated_skips": TOLERATED_SKIPS,
            "replayed": [candidate.to_json() for candidate in judged],
        },
    )
    return LossScaleAnalysis(
        plan=plan,
        limiting_layer=gradients.names[top],
        deciding_layer=deciding,
        underflow_before=before,
        underflow_after=after,
        predicted_overflow_rate=rate,
        worst_before=worst_before,
        non_finite_steps=non_finite,
        fits=lower_exponent <= upper_exponent or (adapts and chosen.fits),
        late=late,
    )


def _weight_gradients(layers: Layers, exponent: int, target: FloatFormat) -> dict[str, float]:
    """What a trainer can see of its own gradients: their largest, and the share that is zero."""
    h = layers.of_kind("weight_grad").histograms
    numel = int(h.numel.sum())
    if numel == 0:
        return {}
    gone = int(h.zeros.sum()) + int(h.lost_to_zero(target, exponent).value.sum())
    return {
        "weight_grad_absmax": float(h.absmax.max()),
        "weight_grad_zero_after": gone / numel,
    }


def lost_by_scale(layers: Layers, target: FloatFormat = FP16) -> NDArray[np.float64]:
    """Share of Σ|x| each layer loses to zero, at scales 2^0 … 2^``LARGEST_EXPONENT``.

    Returns:
        float64 (layers, ``LARGEST_EXPONENT`` + 1).
    """
    h = layers.histograms
    whole = h.abs_sum().value
    columns = [
        share(h.abs_sum(target.zero_exponent - k).value, whole) for k in range(LARGEST_EXPONENT + 1)
    ]
    return np.stack(columns, axis=1) if len(layers) else np.zeros((0, LARGEST_EXPONENT + 1))


def values_lost(
    layers: Layers, target: FloatFormat = FP16, exponent: int = 0
) -> NDArray[np.float64]:
    """Share of its non-zero values that each layer loses to zero at the scale 2^exponent."""
    h = layers.histograms
    return share(h.lost_to_zero(target, exponent).value, h.nonzero)


def needs_scale(values: NDArray[np.float64], sums: NDArray[np.float64]) -> bool:
    """Whether layers that lose these shares of their values and of Σ|g| make a scale needed."""
    return bool((sums >= NEEDED).any()) or _worst_crowd(values, sums) is not None


def _worst_crowd(values: NDArray[np.float64], sums: NDArray[np.float64]) -> int | None:
    """The layer that loses nearly all its values and most of its sum, if any does."""
    rows = np.flatnonzero((values >= NEEDED_VALUES) & (sums >= NEEDED_SUM))
    return int(rows[np.argmax(sums[rows])]) if rows.size else None


def _first_below(losses: NDArray[np.float64], threshold: float) -> int:
    """Smallest exponent at which no layer loses more than the threshold."""
    worst = losses.max(axis=0, initial=0.0)
    below = np.flatnonzero(worst <= threshold)
    return int(below[0]) if below.size else LARGEST_EXPONENT


def _reason(
    need: Need, layer: str, worst: float, before: float, target: FloatFormat, crowd: float | None
) -> str:
    where = layer or "the model's output"
    if need == "needed" and crowd is not None:
        return (
            f"without a scale {target.label} loses {crowd:.0%} of the gradient's values in {where}, "
            f"{worst:.1%} of their sum: small pushes in one direction, which training missed"
        )
    if need == "needed":
        return (
            f"without a scale {target.label} loses {worst:.0%} of the gradient's sum in {where}: "
            "trainings that lost as much went astray"
        )
    if need == "advisable":
        return (
            f"{target.label} loses {worst:.1%} of the gradient's sum in {where}; trainings that lost "
            "as much came out the same, and a scale costs nothing"
        )
    values = f"{before:.1%}" if before == 0 or before >= 5e-4 else "< 0.1%"
    return (
        f"no layer loses more than {max(worst, 1e-4):.2%} of its gradient's sum ({values} of all "
        "values, the smallest), which does not matter"
    )
