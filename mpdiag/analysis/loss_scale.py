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

from mpdiag.analysis.layers import Layers, merge_layers, share
from mpdiag.formats import FP16, FloatFormat
from mpdiag.plan import LossScalePlan, Method, Need

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.records import Records

NEEDED = 0.25
"""Share of Σ|g| that the worst layer loses, late in training, from which a scale is *needed*.

Emulated FP16 trainings on real data, each against its FP32 twin: harmless at 0.0001 (digits CNN),
0.03 (LSTM language model) and 0.16 (denoiser on photographs, which loses 30 % of all its values);
ruinous at 0.29 (Multibox SSD, average precision .85 → .17) and 0.59 (the denoiser at full size).
Counting values alone would rank the harmless denoiser beside the detector that fails.
"""
MATTERS = 0.01
"""Share of Σ|g| in the worst layer below which what is lost no longer matters; from there up to
``NEEDED`` a scale is advised as a harmless insurance, and not called needed."""
NEGLIGIBLE = 0.001
"""The share the recommended scale aims at, where the interval has room."""
MIN_HEADROOM = 2
"""Powers of two kept free above the largest recorded gradient, at least."""
LARGEST_EXPONENT = 24
"""No scale beyond 2^24 is recommended: nothing gains from it."""


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
    records: Records, layers: Layers, target: FloatFormat = FP16
) -> LossScaleAnalysis:
    """Decide on a loss scale from recorded gradients.

    Args:
        records: The run's rows.
        layers: The same, merged.
        target: The format gradients would be stored in.
    """
    gradients = layers.of_kind("activation_grad", "weight_grad")
    steps, maxima, non_finite = step_maxima(records)
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

    late = merge_layers(records, records.step >= np.median(steps)).of_kind("activation_grad")
    losses = lost_by_scale(late, target)
    worst_before = float(losses[:, 0].max(initial=0.0))
    deciding = late.names[int(np.argmax(losses[:, 0]))] if len(late) else None
    lower_exponent = _first_below(losses, MATTERS)
    headroom, drift, spread = _headroom(finite)

    need: Need = "not needed"
    if worst_before >= NEEDED:
        need = "needed"
    elif worst_before >= MATTERS:
        need = "advisable"
    exponent = 0
    if need != "not needed":
        exponent = max(_first_below(losses, NEGLIGIBLE), lower_exponent)
    safe = upper_exponent - headroom
    exponent = min(exponent, max(safe, lower_exponent), upper_exponent)
    rate = overflow_rate(finite, exponent, target, drift)
    method: Method = "none"
    if need != "not needed" or exponent != 0 or non_finite:
        method = "constant" if exponent <= safe and not non_finite and rate < 1e-3 else "backoff"
        if method == "backoff" and spread >= 2.0 and drift < 1.0:
            method = "lognormal"

    everything = layers.of_kind("activation_grad").histograms
    nonzero = everything.nonzero.sum()
    before = float(share(everything.lost_to_zero(target).value.sum(), nonzero))
    after = float(share(everything.lost_to_zero(target, exponent).value.sum(), nonzero))
    scale, lower, upper = (math.ldexp(1.0, e) for e in (exponent, lower_exponent, upper_exponent))
    steps_between = int(np.median(np.diff(steps))) if steps.size > 1 else 1
    plan = LossScalePlan(
        need=need,
        method=method,
        recommended=scale,
        lower=lower,
        upper=upper,
        init_scale=scale,
        # Grow rarely where maxima are steady, sooner where they fall and leave room.
        growth_interval=500 if drift < -1.0 else 2000,
        max_scale=max(scale, math.ldexp(1.0, min(LARGEST_EXPONENT, upper_exponent))),
        min_scale=min(1.0, scale),
        reason=_reason(need, str(deciding or ""), worst_before, before, target),
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
            "headroom_exponents": headroom,
            "maxima_drift_exponents": drift,
            "maxima_spread_exponents": spread,
            "steps": int(steps.size),
            "median_steps_between_recordings": steps_between,
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
        fits=lower_exponent <= upper_exponent,
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


def step_maxima(
    records: Records,
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """The largest unscaled gradient of each recorded step.

    Returns:
        Steps; maxima, infinite where a gradient was not finite; how many of those there are. A step
        that a scaler skipped overflowed by its scale, not by itself, and is left out.
    """
    gradients = records.of_kind("activation_grad") | records.of_kind("weight_grad")
    rows = np.flatnonzero(gradients & ~records.skipped)
    steps, group = np.unique(records.step[rows], return_inverse=True)
    maxima = np.zeros(steps.size)
    values = records.absmax[rows] / records.scale[rows]
    values = np.where(records.infs[rows] + records.nans[rows] > 0, np.inf, values)
    np.maximum.at(maxima, group.reshape(-1), values)
    return steps, maxima, int(np.isinf(maxima).sum())


def overflow_rate(
    maxima: NDArray[np.float64], exponent: int, target: FloatFormat, drift: float = 0.0
) -> float:
    """Expected share of steps whose largest gradient leaves the range at scale 2^exponent.

    The larger of what the recorded steps show and of the tail of a log-normal fitted to them, moved
    by ``drift`` powers of two if that is growth.
    """
    room = math.log2(target.overflow_threshold) - exponent
    logs = np.log2(maxima)
    observed = float(np.mean(logs >= room))
    spread = float(logs.std())
    if spread == 0:
        return observed
    z = (room - float(logs.mean()) - max(0.0, drift)) / spread
    return max(observed, 0.5 * math.erfc(z / math.sqrt(2)))


def _first_below(losses: NDArray[np.float64], threshold: float) -> int:
    """Smallest exponent at which no layer loses more than the threshold."""
    worst = losses.max(axis=0, initial=0.0)
    below = np.flatnonzero(worst <= threshold)
    return int(below[0]) if below.size else LARGEST_EXPONENT


def _headroom(maxima: NDArray[np.float64]) -> tuple[int, float, float]:
    """Powers of two to keep free, the growth of the maxima, and their spread about it.

    Growth is the late half's median over the early half's; three standard deviations cover what a
    longer training would show.
    """
    logs = np.log2(maxima)
    half = len(logs) // 2
    drift = float(np.median(logs[half:]) - np.median(logs[:half])) if half else 0.0
    spread = float(np.std(np.diff(logs)) / math.sqrt(2)) if len(logs) > 2 else 0.0
    wanted = max(0.0, drift) + 3 * spread - (float(logs.max()) - float(np.median(logs[half:])))
    return max(MIN_HEADROOM, math.ceil(wanted)), drift, spread


def _reason(need: Need, layer: str, worst: float, before: float, target: FloatFormat) -> str:
    where = layer or "the model's output"
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
    return (
        f"no layer loses more than {worst:.2%} of its gradient's sum ({before:.1%} of the values): "
        "a scale would change nothing"
    )
