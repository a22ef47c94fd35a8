"""What a comparison finds: metrics, divergence, layers, models, lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from mpdiag.analysis.comparison.equivalence import Equivalence, EquivalenceVerdict
from mpdiag.analysis.comparison.groups import SeedGroup, SeedTraining
from mpdiag.analysis.comparison.margins import Margin
from mpdiag.analysis.comparison.models import ModelRelation
from mpdiag.analysis.comparison.rates import RateComparison
from mpdiag.analysis.findings import Finding, by_severity, info, warning
from mpdiag.display.wording import counted
from mpdiag.runs.training_log import FINAL_LOSS

_BY_PLAN = "train by a plan: mpdiag analyze the FP32 run, then MixedPrecision with its plan"
_WORSE = (
    "if it was not trained by a plan, mpdiag analyze the FP32 run and train by its plan; if it was, "
    "train 3 or more seeds on each side"
)
_MORE_SEEDS = (
    "train 3 or more seeds on each side, with --out fp32/seedN and fp16/seedN, and "
    "compare the folders fp32 and fp16"
)
LENGTHS_ALIKE = 0.95
"""Trainings count as equally long if the shorter one has this share of the longer one's steps."""
WORSE = 3.0
"""One seed counts as worse from this many margins on."""
WINDOWS = 10
"""Parts of the later half of a training, over which two loss curves are compared."""
CROSSING = 0.25
"""A worse final loss decides nothing if in one of these parts b's loss was lower by this share of the
difference, each relative to a's loss there: such curves cross, as a GAN's do."""
BEGINNINGS = 0.05
"""Two trainings began alike if their first losses differ by less than this share."""
OneSeed = Literal[
    "worse (one seed)", "undecided (one seed)", "as FP32 (one seed)", "better (one seed)"
]
ONE_SEED: tuple[OneSeed, ...] = get_args(OneSeed)
"""Answers with one seed on a side; of several metrics' answers the first one counts."""
Answer = EquivalenceVerdict | OneSeed
Tone = Literal["good", "bad", "open"]


def tone_of(answer: str) -> Tone:
    """Whether an answer is good news, bad news, or none yet; ``open`` also where there is no answer."""
    if answer in ("different", "worse (one seed)"):
        return "bad"
    return "open" if answer in ("", "inconclusive", "undecided (one seed)") else "good"


HINDRANCES = ("same-sides", "different-models", "lengths-differ")
"""Findings by which two sides cannot be compared: said before any answer."""
OCTAVES = 3.0
"""A layer whose largest value moved this far counts as changed."""


def comparison_findings(
    metrics: Sequence[MetricComparison],
    divergence: RateComparison,
    models: ModelRelation | None,
    shifts: Sequence[LayerShift],
    sides: tuple[SeedGroup, SeedGroup],
) -> tuple[Finding, ...]:
    """All findings: first what hinders a comparison, then the most severe."""
    decisive = deciding(metrics)
    of_metrics = (_metric_finding(m, decisive) for m in metrics)
    found = by_severity(
        [
            *_same_sides_findings(*sides),
            *_divergence_findings(divergence, sides),
            *filter(None, of_metrics),
            *_margin_findings(metrics),
            *_shift_findings(shifts),
            *_length_findings(*sides),
            *_beginning_findings(*sides),
            *_model_findings(models, sides),
        ]
    )
    return tuple(sorted(found, key=lambda f: not hinders(f)))


def hinders(finding: Finding) -> bool:
    """Whether a finding is said before any answer: the sides cannot be compared, or not fairly."""
    unlike = finding.code == "beginnings-differ" and finding.severity == "warning"
    return unlike or finding.code in HINDRANCES


def began_alike(a: SeedGroup, b: SeedGroup) -> bool:
    """Whether no first loss speaks of a model that was trained on, or of other data."""
    return not any(map(hinders, _beginning_findings(a, b)))


def hindered(a: SeedGroup, b: SeedGroup, models: ModelRelation | None) -> bool:
    """Whether the two sides cannot be compared, see ``HINDRANCES``."""
    other_model = models is not None and models.different
    return other_model or _same_sides(a, b) or lengths_apart(a, b) is not None


def _same_sides(a: SeedGroup, b: SeedGroup) -> bool:
    return a.path == b.path != ""


def _same_sides_findings(a: SeedGroup, b: SeedGroup) -> Iterator[Finding]:
    """That both sides are one path, which says nothing of any difference."""
    if not _same_sides(a, b):
        return
    name = a.name
    yield warning(
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
        yield warning(
            code="different-models",
            message=f"{sides[0].name} and {sides[1].name} are trainings of two different models: "
            + models.words,
            evidence=models.evidence,
            fix="compare trainings of one model: what differs here need not be the precision",
        )
    else:
        yield info(
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
        fix = _BY_PLAN
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


def _metric_finding(m: MetricComparison, decisive: Sequence[MetricComparison]) -> Finding | None:
    r = m.result
    if math.isnan(r.difference):
        if any(map(math.isfinite, [*m.a, *m.b])):
            return None  # one side alone is the rates' finding
        return warning(
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
            fix=_BY_PLAN,
        )
    if m.alone:
        return _one_seed(m, decisive) if m.comparable else None
    if r.verdict == "inconclusive" and m.comparable:
        return _undecided(m)
    return None


def _one_seed(m: MetricComparison, decisive: Sequence[MetricComparison]) -> Finding:
    """What one seed shows; no more than a note where another metric decides."""
    r, answer, decides = m.result, m.answer, m in decisive
    worse, undecided = answer == "worse (one seed)", answer == "undecided (one seed)"
    margins = abs(r.difference) / r.margin
    by = f"{abs(r.difference):.3g}, {margins:.{0 if margins >= 10 else 1}f} margins"
    if answer == "as FP32 (one seed)":
        message = f"{m.metric} differs by {r.difference:+.3g}, within the margin {r.margin:.3g}"
        message = message if r.difference else f"{m.metric} is the same"
    else:
        message = f"{m.metric} is {'worse' if worse or undecided else 'better'} by {by}"
        if undecided and m.crossing:
            message += ", but the loss curves cross in the later half of the training"
    if (worse or undecided) and not decides:
        others = "the other metrics decide" if decisive[1:] else f"{decisive[0].metric} decides"
        message += f"; {others}"
    return Finding(
        severity="error" if worse and decides else "warning" if undecided and decides else "info",
        code="metric-different" if worse else "metric-inconclusive" if undecided else "one-seed",
        message=f"{message} (one seed)",
        evidence=_values(m),
        fix=_WORSE if worse and decides else _MORE_SEEDS,
    )


def _values(m: MetricComparison) -> dict[str, Any]:
    return {"metric": m.metric, "a": list(m.a), "b": list(m.b), "margin": m.result.margin}


def _undecided(m: MetricComparison) -> Finding:
    r = m.result
    within = -r.margin < r.low and r.high < r.margin
    if m.margin.provisional and within:
        fix = f"say how much of it does not matter: --margin '{m.metric}=VALUE'"
    elif r.seeds_to_decide:
        fix = f"train {r.seeds_to_decide} seeds on each side"
    else:
        fix = "choose another margin: the difference equals this one"
    return info(
        code="metric-inconclusive",
        message=f"{m.metric} differs by {r.difference:+.4g}",
        evidence=_values(m),
        fix=fix,
    )


def _margin_findings(metrics: Sequence[MetricComparison]) -> Iterator[Finding]:
    """Metrics of which nobody has said how much does not matter."""
    unknown = [m for m in metrics if m.margin.provisional and math.isfinite(m.result.difference)]
    for m in unknown:
        yield info(
            code="margin-unknown",
            message=f"no margin is known for {m.metric}: a difference over {m.result.margin:.3g} "
            f"(2 % of the mean) counts{'' if m.alone else ', and nothing counts as equivalent'}",
            evidence={"metric": m.metric, "margin": m.result.margin},
            fix=f"say how much does not matter: --margin '{m.metric}=VALUE'",
        )


def _shift_findings(shifts: Sequence[LayerShift]) -> Iterator[Finding]:
    for shift in shifts:
        if abs(shift.octaves) < OCTAVES:
            continue
        direction = "overflow" if shift.octaves > 0 else "underflow"
        yield warning(
            code=f"layer-towards-{direction}",
            message=f"the largest {shift.kind.replace('_', ' ')} of "
            f"{shift.name or 'the model'} moved {abs(shift.octaves):.1f} octaves "
            f"towards {direction}",
            evidence={"kind": shift.kind, "name": shift.name, "octaves": shift.octaves},
            fix="analyze the new run: its loss scale and FP32 operations may have changed",
        )


def _length_findings(a: SeedGroup, b: SeedGroup) -> Iterator[Finding]:
    """Sides that trained for another number of steps, or skipped more of them."""
    lengths = lengths_apart(a, b)
    if lengths:
        yield warning(
            code="lengths-differ",
            message=f"{b.name} trained {counted(lengths[1], 'step')}, {a.name} {lengths[0]}",
            evidence={"a": lengths[0], "b": lengths[1]},
            fix="compare trainings of the same length",
        )
    skipped = [sum(t.skipped for t in side.trainings) for side in (a, b)]
    if skipped[1] > skipped[0]:
        yield info(
            code="more-skips",
            message=f"{skipped[1]} steps were skipped; the reference skipped {skipped[0]}",
            evidence={"a": skipped[0], "b": skipped[1]},
            fix="see the reasons in training.jsonl",
        )


def lengths_apart(a: SeedGroup, b: SeedGroup) -> tuple[int, int] | None:
    """Steps of both sides if they differ; a training that diverged may have ended early."""
    sound = [[t for t in side.trainings if t.losses and not t.diverged] for side in (a, b)]
    steps, rounds = (
        [
            max(((max(t.losses) + 1) // (t.turns if by_round else 1) for t in s), default=0)
            for s in sound
        ]
        for by_round in (False, True)
    )
    if any(not min(n) or min(n) >= LENGTHS_ALIKE * max(n) for n in (steps, rounds)):
        return None
    return steps[0], steps[1]


def _beginning_findings(a: SeedGroup, b: SeedGroup) -> Iterator[Finding]:
    """Sides with other losses in the first step: other weights, other data or another seed."""
    pairs = [(x, y) for x in a.trainings for y in b.trainings if x.seed == y.seed is not None]
    if len(a.trainings) == len(b.trainings) == 1:
        pairs = [(a.trainings[0], b.trainings[0])]
    for x, y in pairs:
        first = _first_losses(x, y)
        if first is None or abs(first[0] - first[1]) <= BEGINNINGS * max(map(abs, first)):
            continue
        seeds = x.seed != y.seed and None not in (x.seed, y.seed)
        yield Finding(
            severity="info" if seeds else "warning",
            code="beginnings-differ",
            message=f"the sides did not begin alike: {y.name}'s first loss is {first[1]:.3g}, "
            f"{x.name}'s {first[0]:.3g}",
            evidence={"a": first[0], "b": first[1], "seeds": [x.seed, y.seed]},
            fix="train both sides from the same seed"
            if seeds
            else "build model and optimizer again before each training, from the same seed and data",
        )
        return


def _first_losses(a: SeedTraining, b: SeedTraining) -> tuple[float, float] | None:
    """Both losses of the first step; None where it was skipped on a side or is not finite."""
    steps = [min(t.losses, default=None) for t in (a, b)]
    if steps[0] is None or steps[0] != steps[1]:
        return None
    first = a.losses[steps[0]], b.losses[steps[0]]
    return first if all(map(math.isfinite, first)) else None


def metric_not_logged(name: str) -> Finding:
    """The script prints a metric that is not in the logs."""
    return info(
        code="metric-not-logged",
        message=f"the script prints {name}, and only the loss was compared",
        evidence={"metric": name},
        fix=f"log it on both sides: mpdiag.log_metric({name!r}, VALUE)",
    )


def deciding(metrics: Sequence[MetricComparison]) -> tuple[MetricComparison, ...]:
    """The metrics that decide with one seed: the final loss only where there is no other."""
    return tuple(m for m in metrics if m.metric != FINAL_LOSS) or tuple(metrics)


def one_seed_answer(worse: float) -> Answer:
    """The verdict with one seed a side, which is worse by so many margins; NaN if that is unknown."""
    if math.isnan(worse):
        return "undecided (one seed)"
    if worse > 1:
        return "worse (one seed)" if worse > WORSE else "undecided (one seed)"
    return "better (one seed)" if worse < -1 else "as FP32 (one seed)"


@dataclass(frozen=True)
class MetricComparison:
    """One metric on both sides.

    Attributes:
        metric: Its name.
        higher_is_better: Whether more is better.
        a, b: One value per seed; NaN where a training that diverged has none.
        result: The equivalence test, of the trainings that did not diverge.
        margin: How much does not matter, and why.
        comparable: Whether the two sides can be compared, see ``HINDRANCES``.
        ahead: Of the final loss, one training a side: see ``farthest_ahead``.
    """

    metric: str
    higher_is_better: bool
    a: tuple[float, ...]
    b: tuple[float, ...]
    result: Equivalence
    margin: Margin
    comparable: bool = True
    ahead: float = 0.0

    @property
    def crossing(self) -> bool:
        """Whether b is worse at the end, and was better by as much before, see ``CROSSING``."""
        return self.worse and self.ahead >= CROSSING * abs(self.result.difference)

    @property
    def margin_given(self) -> bool:
        """Whether the margin was given, rather than chosen by the kind of metric."""
        return self.margin.given

    @property
    def worse(self) -> bool:
        """Whether b's mean is the worse one."""
        return (self.result.difference < 0) == self.higher_is_better

    @property
    def alone(self) -> bool:
        """Whether a side has a single value, so that nothing shows its spread."""
        return min(self.result.seeds) < 2

    @property
    def answer(self) -> Answer:
        """The verdict; with one value on a side, how many margins b is worse by."""
        if not self.alone:
            return self.result.verdict
        if not self.comparable:
            return "undecided (one seed)"
        worse = abs(self.result.difference) / self.result.margin * (1 if self.worse else -1)
        return one_seed_answer(min(worse, WORSE) if self.crossing else worse)


def farthest_ahead(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """How much lower b's loss was than a's in the best part of the later half, see ``WINDOWS``.

    A gap counts as a share of a's loss in its part, times a's loss in the last part: where a loss falls
    by orders of magnitude, an early gap is large by itself. 0 where b's loss never was lower.
    """
    steps = sorted(s for s in a.keys() & b.keys() if math.isfinite(a[s] - b[s]))
    steps = steps[len(steps) // 2 :]
    if len(steps) < WINDOWS:
        return 0.0
    edges = (len(steps) * i // WINDOWS for i in range(WINDOWS + 1))
    parts = [steps[i:j] for i, j in pairwise(edges)]
    levels = [statistics.fmean(abs(a[s]) for s in part) for part in parts]
    gaps = (statistics.fmean(a[s] - b[s] for s in part) for part in parts)
    shares = [gap / level for gap, level in zip(gaps, levels, strict=True) if level > 0]
    return levels[-1] * max(0.0, *shares)


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
