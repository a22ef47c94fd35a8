"""The loss scale: the interval that is admissible, what is lost without one, and the choice.

A scale S is admissible when S·max|g| stays below FP16's largest value over every recorded gradient,
and sufficient when what stays below FP16's range no longer matters, see ``necessity``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.scaling.maxima import Headroom, headroom, overflow_rate
from mpdiag.analysis.scaling.method import (
    TOLERATED_SKIPS,
    MethodChoice,
    ScalingCandidate,
    choose_method,
    gradient_history,
)
from mpdiag.analysis.scaling.necessity import (
    LARGEST_EXPONENT,
    MATTERS,
    NEEDED,
    NEGLIGIBLE,
    Losses,
    Necessity,
    describe_necessity,
    necessity_of,
)
from mpdiag.numerics.formats import FP16, FloatFormat
from mpdiag.numerics.loss_scalers import LARGEST_SCALE, ScaleRange
from mpdiag.plan import LossScalePlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mpdiag.analysis.run_statistics import RunStatistics


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


@dataclass(frozen=True, eq=False)
class _Recorded:
    """What was recorded, as far as it decides the scale.

    Attributes:
        steps: int64 (n,).
        maxima: float64 (n,), see ``maxima.step_maxima``.
        limiting_layer: The layer with the largest gradient.
        absmax: That gradient.
        upper: log2 of the largest scale at which it does not overflow.
        late: Activation gradients of the later half of the steps.
        losses: What they lose.
        lower: log2 of the smallest scale from which that no longer matters.
        room: What may follow the recorded maxima.
    """

    steps: NDArray[np.int64]
    maxima: NDArray[np.float64]
    limiting_layer: str
    absmax: float
    upper: int
    late: Layers
    losses: Losses
    lower: int
    room: Headroom


def analyze_loss_scale(
    statistics: RunStatistics, layers: Layers, target: FloatFormat = FP16
) -> LossScaleAnalysis:
    """Decide on a loss scale from recorded gradients.

    Args:
        statistics: The run's rows.
        layers: The same, merged.
        target: The format gradients would be stored in.
    """
    gradients = layers.of_kind("activation_grad", "weight_grad")
    steps, maxima, non_finite = statistics.step_maxima()
    if len(gradients) == 0 or _finite(maxima).size == 0:
        return _nothing_recorded(layers, non_finite)
    late = statistics.late_gradients(float(np.median(steps)))
    recorded = _recorded(gradients, steps, maxima, late, target)
    necessity = necessity_of(recorded.losses)
    # "none" would not even check for the infinities that this training makes by itself.
    scaled = necessity.wanted or non_finite > 0
    choice = _choose(recorded, necessity, statistics, target, scaled=scaled)
    chosen = choice.chosen
    exponent = _exponent(chosen)
    before, after = (_underflow(layers, k, target) for k in (0, exponent))
    found = LossScaleAnalysis(
        plan=_plan(recorded, necessity, chosen),
        limiting_layer=recorded.limiting_layer,
        deciding_layer=necessity.layer,
        underflow_before=before,
        underflow_after=after,
        predicted_overflow_rate=_overflow_rate(recorded, chosen, target),
        worst_before=necessity.sum_lost,
        non_finite_steps=non_finite,
        fits=recorded.lower <= recorded.upper or (chosen.scaler.adaptive and chosen.fits),
        late=late,
    )
    plan = replace(
        found.plan,
        reason=f"{describe_necessity(necessity, before, target)}; {choice.describe()}",
        evidence=_evidence(found, recorded, choice, _weight_gradients(layers, exponent, target)),
    )
    return replace(found, plan=plan)


def _nothing_recorded(layers: Layers, non_finite: int) -> LossScaleAnalysis:
    return LossScaleAnalysis(
        plan=LossScalePlan(reason="no finite gradient was recorded"),
        limiting_layer=None,
        deciding_layer=None,
        underflow_before=0.0,
        underflow_after=0.0,
        predicted_overflow_rate=0.0,
        worst_before=0.0,
        non_finite_steps=non_finite,
        fits=True,
        late=layers.of_kind("activation_grad"),
    )


def _recorded(
    gradients: Layers,
    steps: NDArray[np.int64],
    maxima: NDArray[np.float64],
    late: Layers,
    target: FloatFormat,
) -> _Recorded:
    largest = int(np.argmax(gradients.histograms.absmax))
    absmax = float(gradients.histograms.absmax[largest])
    losses = Losses.of(late, target)
    return _Recorded(
        steps=steps,
        maxima=maxima,
        limiting_layer=gradients.names[largest],
        absmax=absmax,
        upper=_largest_admissible(absmax, target),
        late=late,
        losses=losses,
        lower=losses.first_below(MATTERS),
        room=headroom(_finite(maxima)),
    )


def _finite(maxima: NDArray[np.float64]) -> NDArray[np.float64]:
    return maxima[np.isfinite(maxima) & (maxima > 0)]


def _largest_admissible(absmax: float, target: FloatFormat) -> int:
    """log2 of the largest power of two whose product with the gradient is below the maximum."""
    exponent = math.ceil(math.log2(target.max / absmax)) - 1
    # The division may have been rounded.
    return exponent + 1 if math.ldexp(absmax, exponent + 1) < target.max else exponent


def _choose(
    recorded: _Recorded,
    necessity: Necessity,
    statistics: RunStatistics,
    target: FloatFormat,
    *,
    scaled: bool,
) -> MethodChoice:
    """Replay the methods over the scales that the recording allows."""
    losses, lower, upper, room = recorded.losses, recorded.lower, recorded.upper, recorded.room
    wanted = max(losses.first_below(NEGLIGIBLE), lower) if necessity.wanted else 0
    safe = upper - room.exponents
    allowed = ScaleRange(wanted=min(wanted, max(safe, lower), upper), safe=safe, upper=upper)
    # The worst layer without a scale, and the worst with it: either may decide.
    deciding = losses.worst_at(0, allowed.wanted)
    history = gradient_history(
        recorded.steps,
        recorded.maxima,
        statistics.by_step(deciding, recorded.steps),
        target,
        MATTERS,
        shrinkage=max(0, math.ceil(-room.drift)) if necessity.wanted else 0,
    )
    return choose_method(history, allowed, headroom=room.exponents, scaled=scaled)


def _exponent(chosen: ScalingCandidate) -> int:
    """log2 of the scale to recommend: the one the method begins with, as a power of two."""
    return math.floor(math.log2(chosen.scale))


def _overflow_rate(recorded: _Recorded, chosen: ScalingCandidate, target: FloatFormat) -> float:
    if chosen.scaler.adaptive:
        return chosen.skipped
    finite = _finite(recorded.maxima)
    return overflow_rate(finite, _exponent(chosen), target, recorded.room.drift)


def _underflow(layers: Layers, exponent: int, target: FloatFormat) -> float:
    """Share of all non-zero activation gradients lost to zero at the scale 2^exponent."""
    h = layers.of_kind("activation_grad").histograms
    return float(share(h.lost_to_zero(target, exponent).value.sum(), h.nonzero.sum()))


def _plan(recorded: _Recorded, necessity: Necessity, chosen: ScalingCandidate) -> LossScalePlan:
    """The decision, without its reason."""
    scale = math.ldexp(1.0, _exponent(chosen))
    admissible = math.ldexp(1.0, min(LARGEST_EXPONENT, recorded.upper))
    plan = LossScalePlan(
        need=necessity.need,
        recommended=scale,
        lower=math.ldexp(1.0, recorded.lower),
        upper=math.ldexp(1.0, recorded.upper),
        min_scale=min(1.0, scale),
        # A scale that adapts may outgrow what the largest recorded gradient allows, once those
        # shrink; it backs off again when they do not.
        max_scale=LARGEST_SCALE if chosen.scaler.adaptive else max(scale, admissible),
    )
    return replace(plan.with_scaler(chosen.scaler), method=chosen.method)


def _evidence(
    found: LossScaleAnalysis,
    recorded: _Recorded,
    choice: MethodChoice,
    weight_gradients: Mapping[str, float],
) -> dict[str, Any]:
    """The numbers the decision rests on, by the names they have in a plan."""
    steps, room = recorded.steps, recorded.room
    return {
        "worst_layer": found.deciding_layer,
        "worst_layer_sum_lost": found.worst_before,
        "threshold_needed": NEEDED,
        "threshold_matters": MATTERS,
        "underflow_before": found.underflow_before,
        "underflow_after": found.underflow_after,
        "absmax": recorded.absmax,
        "absmax_layer": recorded.limiting_layer,
        "predicted_overflow_rate": found.predicted_overflow_rate,
        **weight_gradients,
        "headroom_exponents": room.exponents,
        "maxima_drift_exponents": room.drift,
        "maxima_spread_exponents": room.spread,
        "steps": int(steps.size),
        "median_steps_between_recordings": int(np.median(np.diff(steps))) if steps.size > 1 else 1,
        "tolerated_skips": TOLERATED_SKIPS,
        "replayed": [candidate.to_json() for candidate in choice.judged],
    }


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
