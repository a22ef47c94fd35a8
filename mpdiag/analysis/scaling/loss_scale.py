"""The loss scale: the interval that is admissible, what is lost without one, and the choice.

A scale S is admissible when S·max|g| stays below FP16's largest value over every recorded gradient,
and sufficient when what stays below FP16's range no longer matters, see ``necessity``.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.figures import EMPTY, Figure, FigureTable, Key, layer_figures, pooled_figure
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.analysis.scaling import method
from mpdiag.analysis.scaling.movement import MOVES, Movement, felt, movement_of
from mpdiag.analysis.scaling.necessity import (
    LARGEST_EXPONENT,
    MATTERS,
    NEEDED,
    NEGLIGIBLE,
    SMALLEST_EXPONENT,
    Losses,
    Necessity,
    deciding_part,
    describe_necessity,
    weights_lost,
)
from mpdiag.analysis.scaling.replay import play
from mpdiag.analysis.scaling.windows import Headroom, Window, beyond_range, headroom, whole_window
from mpdiag.display.wording import spoken_layer
from mpdiag.files.documents import finite
from mpdiag.numerics.distributions import CONFIDENCE, largest_share
from mpdiag.numerics.formats import FP16, FP32, FloatFormat
from mpdiag.numerics.loss_scalers import LARGEST_SCALE, ScaleRange
from mpdiag.numerics.rounded import SUM_RATIO, before
from mpdiag.plan import LossScalePlan


@dataclass(frozen=True)
class ScaleBounds:
    """The ends of the interval of loss scales, each with the smallest and largest value it may have.

    Attributes:
        lower: Of the smallest scale that loses too little to matter.
        upper: Of the largest scale at which nothing overflows.
    """

    lower: tuple[float, float]
    upper: tuple[float, float]


@dataclass(frozen=True)
class LossScaleAnalysis:
    """Everything known about the loss scale.

    Attributes:
        plan: The decision.
        limiting_layer: The layer with the largest gradient, which limits the upper end.
        deciding_layer: The layer that loses most, which sets the lower end.
        underflow_before: Share of non-zero activation gradients lost at scale 1, over all layers.
        underflow_after: The same at the recommended scale.
        predicted_overflow_rate: The largest share of steps that may overflow at the recommended
            scale and yet show no more than the recorded steps do, at 95 % confidence.
        overflowing_steps, finite_steps: How many recorded steps overflow at the recommended scale,
            of how many with finite gradients.
        worst_before: Share of Σ|g| the deciding layer loses at scale 1 in ``window``.
        non_finite_steps: Steps whose FP32 gradients were infinite or NaN already.
        fits: Whether any scale is both admissible and sufficient.
        tight: Whether the best scale still loses what may matter, though trainings that lost as much
            reached the same result.
        out_of_reach: Layers that lose as much at each admissible scale as without one: they have no
            part in the decision.
        fp32_modules: The modules that must stay FP32 for a scale to fit.
        late: Activation gradients of ``window``, the late part of the training that decides.
        window: That part; None where no gradient was recorded.
        void: Why nothing can be concluded, as a clause; empty where something can.
        diverges: Whether that is because the recorded training diverges.
        figures: The figures that claims about the scale are made with.
        recorded_in: The precision of the recorded training.
        bounds: Between what the ends of the interval lie, where the recorded values were rounded before.
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
    overflowing_steps: int = 0
    finite_steps: int = 0
    tight: bool = False
    out_of_reach: frozenset[str] = frozenset()
    fp32_modules: tuple[str, ...] = ()
    window: Window | None = None
    void: str = ""
    diverges: bool = False
    figures: FigureTable = EMPTY
    recorded_in: str = FP32.label
    bounds: ScaleBounds | None = None

    def depends_on(self, names: Collection[str]) -> bool:
        """Whether gradients of these layers and parameters set the interval, or the need."""
        pooled = self.figures.find("all-weights-sum") is not None
        return bool(names) and (pooled or any(name in names for name in self._ends()))

    def ends(self, modules: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """The modules that hold each layer or parameter which sets the interval, the innermost first."""
        return tuple(tuple(n for n in _around(end) if n in modules) for end in self._ends())

    def _ends(self) -> tuple[str, ...]:
        """The layers and parameters at the ends of the interval, and those that decide."""
        lowest = self.figures.find("scale-lower")
        ends = (
            self.limiting_layer,
            None if lowest is None else lowest.layer,
            self.deciding_layer,
            *sorted(self.out_of_reach),
        )
        return tuple(name for name in ends if name is not None)

    def to_json(self) -> dict[str, Any]:
        """The ``loss_scale`` of ``mpdiag analyze --json``."""
        p = self.plan
        document: dict[str, Any] = {
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
            "out_of_reach": sorted(self.out_of_reach),
            "fp32_modules": list(self.fp32_modules),
            "reason": p.reason,
            "evidence": dict(p.evidence),
            "overflowing_steps": self.overflowing_steps,
            "finite_steps": self.finite_steps,
            "window": None if self.window is None else asdict(self.window),
        } | ({} if self.bounds is None else {"bounds": asdict(self.bounds)})
        plain: dict[str, Any] = finite(document)
        return plain


def _around(name: str) -> Iterator[str]:
    """A name and those of the modules around it, but for the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class _Recorded:
    """What was recorded, as far as it decides the scale.

    Attributes:
        steps: int64 (n,).
        maxima: float64 (n,), see ``maxima.step_maxima``.
        limiting_layer: The layer with the largest gradient.
        absmax: That gradient.
        upper: log2 of the largest scale at which it does not overflow.
        late: Each late part of the training, and its activation gradients.
        losses: What those of them lose that move weights, without what is out of reach.
        lower: log2 of the smallest scale from which that no longer matters; 0 or above, unless a
            gradient overflows at scale 1 or comes near it.
        room: What may follow the recorded maxima.
        out_of_reach: See ``LossScaleAnalysis``.
    """

    steps: NDArray[np.int64]
    maxima: NDArray[np.float64]
    limiting_layer: str
    absmax: float
    upper: int
    late: list[tuple[Window, Layers]]
    losses: Losses
    lower: int
    room: Headroom
    out_of_reach: frozenset[str] = frozenset()


def analyze_loss_scale(
    statistics: RunStatistics,
    layers: Layers,
    target: FloatFormat = FP16,
    optimizers: Collection[Mapping[str, Any]] = (),
    unclipped: Mapping[int, float] = MappingProxyType({}),
    rounded_to: FloatFormat | None = None,
) -> LossScaleAnalysis:
    """Decide on a loss scale from recorded gradients.

    Args:
        statistics: The run's rows.
        layers: The same, merged.
        target: The format gradients would be stored in.
        optimizers: Their settings, as ``meta.json`` has them.
        unclipped: By step, the largest weight gradient before the loop clipped it, where that is known.
        rounded_to: The format that the recorded values were rounded to, if it is narrower than FP32.
    """
    recorded_in = (rounded_to or FP32).label
    gradients = layers.of_kind("activation_grad", "weight_grad")
    steps, maxima, non_finite = statistics.step_maxima()
    before_clipping = np.array([unclipped.get(step, 0.0) for step in steps.tolist()])
    maxima = np.maximum(maxima, before_clipping)
    finite = len(gradients) and _is_finite(maxima).any()
    if not finite or len(layers.of_kind("activation_grad")) == 0:
        none = f"no {'activation' if finite else 'finite'} gradient was recorded"
        return nothing_concluded(layers, non_finite, none, target, statistics.steps())
    parts = statistics.late_gradients()
    late = [(window, part.of_kind("activation_grad")) for window, part in parts]
    movements = [
        movement_of(statistics.paths_in(window), layers, part, optimizers) for window, part in parts
    ]
    top = float(before_clipping.max(initial=0.0))
    trained = statistics.trained_in(steps)
    recorded = _recorded(gradients, steps, maxima, trained, late, movements, target, top)
    diverges = _why_diverging(recorded, recorded_in)
    if diverges:
        return nothing_concluded(
            layers,
            non_finite,
            diverges,
            target,
            statistics.steps(),
            diverges=True,
            recorded_in=recorded_in,
        )
    necessity, part = deciding_part(recorded.losses, [window for window, _ in late])
    unscaled = beyond_range(maxima, target)
    if unscaled:
        known = int(np.isfinite(maxima).sum())
        necessity = replace(necessity, need="needed", overflowing=unscaled, steps=known)
    elif necessity.need != "needed" and (
        gone := weights_lost(
            [part for part, m in zip(parts, movements, strict=True) if m.relative("") >= MOVES],
            target,
        )
    ):
        recorded = replace(recorded, lower=max(recorded.lower, gone.keeps))
        necessity = replace(necessity, need="needed", weights=gone)
    # "none" would not even check for the infinities that this training makes by itself.
    scaled = necessity.wanted or non_finite > 0
    choice = _choose(recorded, necessity, statistics, target, scaled=scaled)
    chosen = choice.chosen
    over, known = _overflowing(recorded, chosen, target)
    told = _figures(recorded, layers, statistics.steps(), choice, part, target, necessity)
    figures = FigureTable(tuple(told), necessity.layer)
    necessity = replace(
        necessity,
        unmoved=_unmoved(recorded, part, figures, necessity.sum_lost),
        beyond=tuple(sorted(recorded.out_of_reach)),
    )
    before = figures.find("all-values")
    after = figures.find("all-values-scaled") or before
    sufficient = recorded.lower <= recorded.upper or (chosen.scaler.adaptive and chosen.fits)
    top = min(recorded.upper, LARGEST_EXPONENT)
    found = LossScaleAnalysis(
        plan=_plan(recorded, necessity, chosen),
        limiting_layer=recorded.limiting_layer,
        deciding_layer=necessity.layer,
        underflow_before=before.value if before else math.nan,
        underflow_after=after.value if after else math.nan,
        predicted_overflow_rate=largest_share(over, known),
        worst_before=necessity.sum_lost,
        non_finite_steps=non_finite,
        fits=sufficient or not recorded.losses.harmful_at(top),
        late=recorded.late[part][1] if part >= 0 else layers.of_kind("activation_grad"),
        overflowing_steps=over,
        finite_steps=known,
        tight=not sufficient,
        out_of_reach=recorded.out_of_reach,
        window=recorded.late[part][0] if part >= 0 else None,
        figures=figures,
        recorded_in=recorded_in,
        bounds=None if rounded_to is None else _bounds(recorded, necessity, rounded_to, target),
    )
    weight_gradients = _weight_gradients(layers, _exponent(chosen), target)
    plan = replace(
        found.plan,
        reason=f"{describe_necessity(necessity, figures, target)}; {choice.describe()}",
        evidence=_evidence(found, recorded, choice, necessity.unmoved, weight_gradients),
    )
    return replace(found, plan=plan)


def _unmoved(recorded: _Recorded, part: int, figures: FigureTable, lost: float) -> tuple[str, ...]:
    """The layers that move no weights and lose more than the deciding one, and enough to matter."""
    if part < 0:
        return ()
    moving = {*recorded.losses.parts[part].names, *recorded.out_of_reach}
    others = [f for f in figures if f.key == "layer-sum" and f.layer not in moving]
    return tuple(f.layer or "" for f in others if f.value > max(lost, MATTERS))


def _figures(
    recorded: _Recorded,
    layers: Layers,
    steps: NDArray[np.int64],
    choice: method.MethodChoice,
    part: int,
    target: FloatFormat,
    necessity: Necessity,
) -> Iterator[Figure]:
    """The figures that claims about the scale are made with.

    Args:
        recorded: What decides.
        layers: All merged rows.
        steps: The recorded steps.
        choice: The method.
        part: The late part of the training that decides; -1 without any.
        target: The format.
        necessity: Whether a scale is needed.
    """
    chosen, whole, fmt = choice.chosen, whole_window(steps), target.name
    exponent = _exponent(chosen)
    if part >= 0:
        window, late = recorded.late[part]
        yield from layer_figures(late, window, target, exponent)
    yield pooled_figure(layers, whole, target, 0)
    if (gone := necessity.weights) is not None:
        yield Figure(
            "all-weights-sum", gone.share, "sum", gone.window, fmt, 1.0, kind="weight_grad"
        )
    if exponent:
        yield pooled_figure(layers, whole, target, exponent)
    scale = None if chosen.scaler.adaptive else math.ldexp(1.0, exponent)
    if chosen.layer is not None and chosen.window is not None:
        yield Figure(
            "replayed-sum",
            chosen.lost,
            "sum",
            chosen.window,
            fmt,
            scale,
            chosen.layer,
            kind="activation_grad",
        )
    over, known = _overflowing(recorded, chosen, target)
    counts: tuple[tuple[Key, int, float | None], ...] = (
        ("overflowing-unscaled", beyond_range(recorded.maxima, target), 1.0),
        ("overflowing-steps", over, scale),
    )
    for key, count, at in counts:
        yield Figure(key, count / max(1, known), "steps", whole, fmt, at, count=count, of=known)
    yield Figure(
        "overflow-bound",
        largest_share(over, known),
        "steps",
        whole,
        fmt,
        scale,
        count=over,
        of=known,
        bound="at most",
        confidence=CONFIDENCE,
    )
    yield from _interval(recorded, whole, target)


def _interval(recorded: _Recorded, whole: Window, target: FloatFormat) -> Iterator[Figure]:
    """The ends of the interval of scales, each with the layer that sets it."""
    worst = recorded.losses.worst_row(recorded.lower - 1)
    if worst is not None:
        part, layer = worst
        yield Figure(
            "scale-lower",
            math.ldexp(1.0, recorded.lower),
            "loss scale",
            window=recorded.late[part][0],
            format=target.name,
            layer=layer,
            kind="activation_grad",
            bound="at least",
        )
    yield Figure(
        "scale-upper",
        math.ldexp(1.0, recorded.upper),
        "loss scale",
        window=whole,
        format=target.name,
        layer=recorded.limiting_layer,
        bound="at most",
    )


def nothing_concluded(
    layers: Layers,
    non_finite: int,
    reason: str,
    target: FloatFormat,
    steps: NDArray[np.int64],
    *,
    diverges: bool = False,
    recorded_in: str = FP32.label,
) -> LossScaleAnalysis:
    """Of a run that bears no statement on the loss scale: what was counted, and no more.

    Args:
        layers: Its merged rows.
        non_finite: Steps with a gradient that was not finite.
        reason: Why it bears none, as a clause.
        target: The format.
        steps: The recorded steps, in order.
        diverges: Whether it is a training that diverges.
        recorded_in: The precision of the recorded training.
    """
    lost = pooled_figure(layers, whole_window(steps), target, 0)
    return LossScaleAnalysis(
        plan=LossScalePlan(need="unknown", reason=reason),
        limiting_layer=None,
        deciding_layer=None,
        underflow_before=lost.value,
        underflow_after=math.nan,
        predicted_overflow_rate=math.nan,
        worst_before=math.nan,
        non_finite_steps=non_finite,
        fits=True,
        late=layers.of_kind("activation_grad"),
        void=reason,
        diverges=diverges,
        figures=FigureTable((lost,)),
        recorded_in=recorded_in,
    )


def nothing_stored(found: LossScaleAnalysis, target: FloatFormat) -> LossScaleAnalysis:
    """The same where every gradient stays FP32: nothing is lost, and nothing overflows.

    Args:
        found: Of gradients that are stored in the format.
        target: The format.
    """
    known = FigureTable(tuple(f for f in found.figures if f.key == "all-values"))
    return replace(
        found,
        plan=LossScalePlan(
            need="not needed", reason=f"every recorded gradient stays FP32, none is {target.label}"
        ),
        limiting_layer=None,
        deciding_layer=None,
        fits=True,
        tight=False,
        out_of_reach=frozenset(),
        overflowing_steps=0,
        predicted_overflow_rate=0.0,
        figures=known,
    )


def _why_diverging(recorded: _Recorded, recorded_in: str) -> str:
    """Why the recorded training is one that diverges, as a clause; empty if it does not show that."""
    if not math.isfinite(recorded.maxima[-1]):
        first = int(recorded.steps[np.argmax(~np.isfinite(recorded.maxima))])
        return (
            f"the {recorded_in} training diverges: its gradients are infinite or NaN from step {first} "
            "on"
        )
    if recorded.upper < SMALLEST_EXPONENT:
        where = spoken_layer(recorded.limiting_layer)
        reach = f"its gradients reach {recorded.absmax:.1e} in {where}"
        return f"the {recorded_in} training diverges: {reach}"
    return ""


def _recorded(
    gradients: Layers,
    steps: NDArray[np.int64],
    maxima: NDArray[np.float64],
    trained: NDArray[np.int64],
    late: list[tuple[Window, Layers]],
    movements: list[Movement],
    target: FloatFormat,
    before_clipping: float,
) -> _Recorded:
    largest = int(np.argmax(gradients.histograms.absmax))
    absmax = max(float(gradients.histograms.absmax[largest]), before_clipping)
    known = _is_finite(maxima)
    upper, room = largest_admissible(absmax, target), headroom(maxima[known], trained[known])
    # Below 1 only as far as gradients that overflow, or come near it, ask for it.
    lowest = max(SMALLEST_EXPONENT, min(0, upper - room.exponents))
    moving = [
        layers.select(felt(layers, movement))
        for (_, layers), movement in zip(late, movements, strict=True)
    ]
    losses = Losses.of(moving, movements, target, lowest)
    lost = frozenset[str]()
    if losses.first_below(MATTERS) > upper >= 0:
        lost = losses.out_of_reach(min(upper, LARGEST_EXPONENT))
        losses = losses.without(lost) if lost else losses
    return _Recorded(
        steps=steps,
        maxima=maxima,
        limiting_layer=gradients.names[largest],
        absmax=absmax,
        upper=upper,
        late=late,
        losses=losses,
        lower=losses.first_below(MATTERS),
        room=room,
        out_of_reach=lost,
    )


def _bounds(
    recorded: _Recorded, necessity: Necessity, rounded_to: FloatFormat, target: FloatFormat
) -> ScaleBounds:
    """Between what the ends of the interval lie, if the values were not rounded yet.

    A layer loses as much at a scale as its rounded values do there, or as they do at twice the scale.
    """
    least, most = before(recorded.absmax, rounded_to)
    first = recorded.losses.first_below
    lower = first(MATTERS * SUM_RATIO) - 1, first(MATTERS / SUM_RATIO)
    if necessity.weights is not None:
        lower = lower[0], max(lower[1], necessity.weights.keeps_surely)
    upper = largest_admissible(most, target), largest_admissible(least, target)
    low, high = ((math.ldexp(1.0, a), math.ldexp(1.0, b)) for a, b in (lower, upper))
    return ScaleBounds(low, high)


def _is_finite(maxima: NDArray[np.float64]) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = np.isfinite(maxima) & (maxima > 0)
    return known


def largest_admissible(absmax: float, target: FloatFormat) -> int:
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
) -> method.MethodChoice:
    """Replay the methods over the scales that the recording allows."""
    losses, lower, upper, room = recorded.losses, recorded.lower, recorded.upper, recorded.room
    wanted = max(losses.first_below(NEGLIGIBLE), lower) if necessity.wanted else min(0, lower)
    safe = max(SMALLEST_EXPONENT, upper - room.exponents)
    allowed = ScaleRange(wanted=min(wanted, max(safe, lower), upper), safe=safe, upper=upper)
    # The worst layer without a scale, and the worst with it: either may decide.
    deciding = losses.worst_at(0, allowed.wanted)
    history = method.gradient_history(
        recorded.steps,
        recorded.maxima,
        statistics.by_step(deciding, recorded.steps),
        target,
        MATTERS,
        shrinkage=max(0, math.ceil(-room.drift)) if necessity.wanted else 0,
        windows=[window for window, _ in recorded.late],
        names=deciding,
    )
    return method.choose_method(history, allowed, headroom=room.exponents, scaled=scaled)


def _exponent(chosen: method.ScalingCandidate) -> int:
    """log2 of the scale to recommend: the one the method begins with, as a power of two."""
    return math.floor(math.log2(chosen.scale))


def _overflowing(
    recorded: _Recorded, chosen: method.ScalingCandidate, target: FloatFormat
) -> tuple[int, int]:
    """In how many recorded steps the chosen method overflows, of how many with finite gradients."""
    played = play(recorded.steps, recorded.maxima, chosen.scaler, target)
    known = np.isfinite(recorded.maxima)
    return int(played.overflow[known].sum()), int(known.sum())


def _plan(
    recorded: _Recorded, necessity: Necessity, chosen: method.ScalingCandidate
) -> LossScalePlan:
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
    choice: method.MethodChoice,
    unmoved: tuple[str, ...],
    weight_gradients: Mapping[str, float],
) -> dict[str, Any]:
    """The numbers the decision rests on, by the names they have in a plan."""
    steps, room = recorded.steps, recorded.room
    return {
        "worst_layer": found.deciding_layer,
        "worst_layer_sum_lost": found.worst_before,
        "unmoved_layers": list(unmoved),
        "window": None if found.window is None else asdict(found.window),
        "threshold_needed": NEEDED,
        "threshold_matters": MATTERS,
        "underflow_before": found.underflow_before,
        "underflow_after": found.underflow_after,
        "absmax": recorded.absmax,
        "absmax_layer": recorded.limiting_layer,
        "predicted_overflow_rate": found.predicted_overflow_rate,
        "overflowing_steps": found.overflowing_steps,
        "finite_steps": found.finite_steps,
        "overflow_confidence": CONFIDENCE,
        **weight_gradients,
        "headroom_exponents": room.exponents,
        "maxima_drift_exponents": room.drift,
        "maxima_spread_exponents": room.spread,
        "steps": int(steps.size),
        "median_steps_between_recordings": int(np.median(np.diff(steps))) if steps.size > 1 else 1,
        "tolerated_skips": method.TOLERATED_SKIPS,
        "replayed": [candidate.to_json() for candidate in choice.judged],
    }


def _weight_gradients(layers: Layers, exponent: int, target: FloatFormat) -> dict[str, float]:
    """What a trainer can see of its own gradients: their largest, and the share that is zero."""
    h = layers.of_kind("weight_grad").histograms
    numel = int(h.numel.sum())
    if numel == 0:
        return {}
    gone = int(h.zeros.sum()) + int(h.lost_to_zero(target, exponent).value.sum())
    return {"weight_grad_absmax": float(h.absmax.max()), "weight_grad_zero_after": gone / numel}
