"""What a comparison finds: metrics, divergence, layers, models, lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpdiag.analysis.comparison.equivalence import Equivalence
from mpdiag.analysis.comparison.groups import SeedGroup
from mpdiag.analysis.comparison.margins import Margin
from mpdiag.analysis.comparison.models import ModelRelation
from mpdiag.analysis.comparison.rates import RateComparison
from mpdiag.analysis.findings import Finding, by_severity
from mpdiag.display.wording import counted

LENGTHS_ALIKE = 0.95
"""Trainings count as equally long if the shorter one has this share of the longer one's steps."""
OCTAVES = 3.0
"""A layer whose largest value moved this far counts as changed."""


def comparison_findings(
    metrics: Sequence[MetricComparison],
    divergence: RateComparison,
    models: ModelRelation | None,
    shifts: Sequence[LayerShift],
    sides: tuple[SeedGroup, SeedGroup],
) -> tuple[Finding, ...]:
    """All findings: different models first, then the most severe."""
    found = by_severity(
        [
            *_divergence_findings(divergence, sides),
            *(f for m in metrics if (f := _metric_finding(m)) is not None),
            *_margin_findings(metrics),
            *_shift_findings(shifts),
            *_length_findings(*sides),
            *_model_findings(models, sides),
        ]
    )
    return tuple(sorted(found, key=lambda f: f.code != "different-models"))


def same_sides(name: str) -> Finding:
    """That both sides are one path, which says nothing of any difference."""
    return Finding(
        severity="warning",
        code="same-sides",
        message=f"both sides are {name}: this compares it with itself, which shows nothing",
        evidence={"side": name},
        fix="name another training as the second side",
    )


def _model_findings(
    models: ModelRelation | None, sides: tuple[SeedGroup, SeedGroup]
) -> Iterator[Finding]:
    if models is None or not models.words:
        return
    if models.different:
        yield Finding(
            severity="warning",
            code="different-models",
            message=f"{sides[0].name} and {sides[1].name} are trainings of two different models: "
            + models.words,
            evidence=models.evidence,
            fix="compare trainings of one model: what differs here need not be the precision",
        )
    else:
        yield Finding(
            severity="info",
            code="models-differ",
            message=f"the model of {sides[1].name} is an edited one of {sides[0].name}: "
            + models.words,
            evidence=models.evidence,
            fix="what differs between the two trainings need not be the precision",
        )


def rate_words(divergence: RateComparison, sides: tuple[SeedGroup, SeedGroup]) -> str:
    """How many trainings of each side diverged, with the interval of each rate, b first."""
    (a, b), (n, m) = divergence.diverged, divergence.seeds
    (low_a, high_a), (low_b, high_b) = divergence.intervals
    return (
        f"{sides[1].name} diverged in {b} of {counted(m, 'training')} (95 % interval "
        f"{_whole(low_b)} to {_whole(high_b)}), {sides[0].name} in {a} of {n} "
        f"({_whole(low_a)} to {_whole(high_a)})"
    )


def _whole(rate: float) -> str:
    return f"{100 * rate:.0f} %"


def _divergence_findings(
    divergence: RateComparison, sides: tuple[SeedGroup, SeedGroup]
) -> Iterator[Finding]:
    """One where any training diverged; an error where b's diverged more often, proved or not."""
    if not divergence.any:
        return
    (a, b), (n, m) = divergence.diverged, divergence.seeds
    shown = divergence.verdict == "different"
    equal = a * m == b * n
    if shown:
        proof = f"the rates are different (p = {divergence.p_value:.2g})"
    elif equal:
        proof = "at the same rate"
    else:
        proof = f"which does not show the rates to be different (p = {divergence.p_value:.2g})"
    if a == n:
        fix = "check the data, the learning rate and the loss: the reference itself does not train"
    elif divergence.seeds_to_decide:
        fix = f"{divergence.seeds_to_decide} seeds on each side would show whether the rates differ"
    elif divergence.more_in_b:
        fix = "train by a plan: mpdiag analyze the FP32 run, then MixedPrecision with its plan"
    else:
        fix = "the metrics are those of the trainings that did not diverge"
    more_in_a = not equal and not divergence.more_in_b
    yield Finding(
        severity="error"
        if divergence.more_in_b
        else "warning"
        if a == n or (shown and more_in_a)
        else "info",
        code="diverges-more" if divergence.more_in_b else "trainings-diverged",
        message=f"{rate_words(divergence, sides)}, {proof}",
        evidence=divergence.to_json(),
        fix=fix,
    )


def _metric_finding(m: MetricComparison) -> Finding | None:
    r = m.result
    if math.isnan(r.difference):
        if any(map(math.isfinite, [*m.a, *m.b])):
            return None  # one side alone is the rates' finding
        return Finding(
            severity="warning",
            code="metric-inconclusive",
            message=f"{m.metric} is not finite on either side: all trainings diverged",
            evidence=_values(m),
            fix="check the data, the learning rate and the loss: the reference itself does not train",
        )
    if r.verdict == "different":
        return Finding(
            severity="error" if m.worse else "warning",
            code="metric-different",
            message=f"{m.metric} differs by {r.difference:+.4g}, more than the margin "
            f"{r.margin:.3g}",
            evidence=_values(m),
            fix="train by a plan: mpdiag analyze the FP32 run, then MixedPrecision with its plan",
        )
    return _undecided(m) if r.verdict == "inconclusive" else None


def _values(m: MetricComparison) -> dict[str, Any]:
    return {"metric": m.metric, "a": list(m.a), "b": list(m.b), "margin": m.result.margin}


def _undecided(m: MetricComparison) -> Finding:
    r = m.result
    alone = min(r.seeds) < 2
    beyond = alone and abs(r.difference) > r.margin
    within = not alone and -r.margin < r.low and r.high < r.margin
    message = f"{m.metric} differs by {r.difference:+.4g}"
    if beyond:
        message += f", more than the margin {r.margin:.3g}, with a single seed"
    elif alone:
        message += " with a single seed, which does not show its spread"
    if alone:
        fix = (
            "train 3 or more seeds on each side, with --out fp32/seed0, fp32/seed1 … "
            "fp16/seed0 …, and compare the folders fp32 and fp16"
        )
    elif m.margin.provisional and within:
        fix = f"say how much of it does not matter: --margin '{m.metric}=VALUE'"
    elif r.seeds_to_decide:
        fix = f"train {r.seeds_to_decide} seeds on each side"
    else:
        fix = "choose another margin: the difference equals this one"
    return Finding(
        severity="warning" if beyond else "info",
        code="metric-inconclusive",
        message=message,
        evidence=_values(m),
        fix=fix,
    )


def _margin_findings(metrics: Sequence[MetricComparison]) -> Iterator[Finding]:
    """Metrics of which nobody has said how much does not matter."""
    unknown = [m for m in metrics if m.margin.provisional and math.isfinite(m.result.difference)]
    for m in unknown:
        yield Finding(
            severity="info",
            code="margin-unknown",
            message=f"how much of a difference in {m.metric} does not matter is not known: until it "
            f"is given, a difference beyond {m.result.margin:.3g} (2 % of the mean) counts as one, "
            "and nothing as equivalent",
            evidence={"metric": m.metric, "margin": m.result.margin},
            fix=f"say how much does not matter: --margin '{m.metric}=VALUE'",
        )


def _shift_findings(shifts: Sequence[LayerShift]) -> Iterator[Finding]:
    for shift in shifts:
        if abs(shift.octaves) < OCTAVES:
            continue
        direction = "overflow" if shift.octaves > 0 else "underflow"
        yield Finding(
            severity="warning",
            code=f"layer-towards-{direction}",
            message=f"the largest {shift.kind.replace('_', ' ')} of "
            f"{shift.name or 'the model'} moved {abs(shift.octaves):.1f} octaves "
            f"towards {direction}",
            evidence={"kind": shift.kind, "name": shift.name, "octaves": shift.octaves},
            fix="analyze the new run: its loss scale and FP32 operations may have changed",
        )


def _length_findings(a: SeedGroup, b: SeedGroup) -> Iterator[Finding]:
    """Sides that trained for another number of steps, or skipped more of them."""
    lengths = [
        max((max(t.losses) + 1 for t in side.trainings if t.losses), default=0) for side in (a, b)
    ]
    if min(lengths) and min(lengths) < LENGTHS_ALIKE * max(lengths):
        yield Finding(
            severity="warning",
            code="lengths-differ",
            message=f"{b.name} trained {lengths[1]} steps and {a.name} {lengths[0]}",
            evidence={"a": lengths[0], "b": lengths[1]},
            fix="compare trainings of the same length",
        )
    skipped = [sum(t.skipped for t in side.trainings) for side in (a, b)]
    if skipped[1] > skipped[0]:
        yield Finding(
            severity="info",
            code="more-skips",
            message=f"{skipped[1]} steps were skipped; the reference skipped {skipped[0]}",
            evidence={"a": skipped[0], "b": skipped[1]},
            fix="see the reasons in training.jsonl",
        )


@dataclass(frozen=True)
class MetricComparison:
    """One metric on both sides.

    Attributes:
        metric: Its name.
        higher_is_better: Whether more is better.
        a, b: One value per seed; NaN where a training that diverged has none.
        result: The equivalence test, of the trainings that did not diverge.
        margin: How much does not matter, and why.
    """

    metric: str
    higher_is_better: bool
    a: tuple[float, ...]
    b: tuple[float, ...]
    result: Equivalence
    margin: Margin

    @property
    def margin_given(self) -> bool:
        """Whether the margin was given, rather than chosen by the kind of metric."""
        return self.margin.given

    @property
    def worse(self) -> bool:
        """Whether b's mean is the worse one."""
        return (self.result.difference < 0) == self.higher_is_better


@dataclass(frozen=True)
class Curve:
    """The difference between two loss curves.

    Attributes:
        steps: Steps that both sides have.
        worst_step: The step with the largest gap between the means; None without common steps.
        departure: That gap, in the loss's units (b minus a).
        spread: Standard deviation over seeds at that step on the first side; None for one seed.
    """

    steps: int
    worst_step: int | None
    departure: float
    spread: float | None


@dataclass(frozen=True)
class LayerShift:
    """A layer with a largest value that moved.

    Attributes:
        kind, name: The layer.
        octaves: log2 of b's largest |x| over a's, averaged over seeds.
    """

    kind: str
    name: str
    octaves: float


def mean_of_finite(values: Sequence[float]) -> float:
    """The mean of the trainings that did not diverge; NaN if all did."""
    finite = [v for v in values if math.isfinite(v)]
    return statistics.fmean(finite) if finite else math.nan
