"""``compare``: FP32 against mixed precision, over seeds: metrics, curves, layers."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.comparison.equivalence import (
    Equivalence,
    EquivalenceVerdict,
    judge_equivalence,
)
from mpdiag.analysis.comparison.groups import SeedGroup, read_group
from mpdiag.analysis.findings import Finding, by_severity
from mpdiag.analysis.notebook import comparison_html
from mpdiag.errors import UsageError
from mpdiag.files.documents import finite

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

SCHEMA_VERSION = 1
DEFAULT_MARGIN = 0.02
"""Share of the first side's mean that serves as the margin where none is given."""
LENGTHS_ALIKE = 0.95
"""Trainings count as equally long if the shorter one has this share of the longer one's steps."""
OCTAVES = 3.0
"""A layer whose largest value moved this far counts as changed."""


@dataclass(frozen=True)
class MetricComparison:
    """One metric on both sides.

    Attributes:
        metric: Its name.
        higher_is_better: Whether more is better.
        a, b: One value per seed.
        result: The equivalence test.
        margin_given: Whether the margin was given, rather than a share of the mean.
    """

    metric: str
    higher_is_better: bool
    a: tuple[float, ...]
    b: tuple[float, ...]
    result: Equivalence
    margin_given: bool

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
    """A layer whose largest value moved.

    Attributes:
        kind, name: The layer.
        octaves: log2 of b's largest |x| over a's, averaged over seeds.
    """

    kind: str
    name: str
    octaves: float


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``."""

    a: SeedGroup
    b: SeedGroup
    metrics: tuple[MetricComparison, ...]
    curve: Curve
    shifts: tuple[LayerShift, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> EquivalenceVerdict:
        """Different if any metric is, equivalent if all are."""
        found = {m.result.verdict for m in self.metrics}
        if "different" in found:
            return "different"
        return "equivalent" if found == {"equivalent"} else "inconclusive"

    def __repr__(self) -> str:
        return f"<Comparison of {self.a.name!r} and {self.b.name!r}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """The verdict and the metrics in a notebook."""
        rows = [
            (m.metric, statistics.fmean(m.a), statistics.fmean(m.b), m.result.verdict)
            for m in self.metrics
        ]
        names = (self.a.name, self.b.name)
        return comparison_html(names, self.verdict, rows, self.findings)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag compare --json``; what is not finite is null."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "a": {"name": self.a.name, "seeds": [t.seed for t in self.a.trainings]},
            "b": {"name": self.b.name, "seeds": [t.seed for t in self.b.trainings]},
            "verdict": self.verdict,
            "metrics": [
                {
                    "metric": m.metric,
                    "higher_is_better": m.higher_is_better,
                    "a": list(m.a),
                    "b": list(m.b),
                    "margin_given": m.margin_given,
                    **asdict(m.result),
                }
                for m in self.metrics
            ],
            "curve": asdict(self.curve),
            "layers": [asdict(s) for s in self.shifts],
            "findings": [f.to_json() for f in self.findings],
        }
        plain: dict[str, Any] = finite(document)
        return plain


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    metric: str | None = None,
    margin: float | None = None,
    alpha: float = 0.05,
) -> Comparison:
    """Compare two trainings, or two sets of seeds.

    Args:
        a: The reference (FP32): a run folder, a folder of runs, or a baseline file.
        b: The candidate: the same kinds of paths.
        metric: Only this metric; default: all that both sides have.
        margin: The largest difference that does not matter, in the metric's own units; default:
            2 % of the reference's mean, which the result says.
        alpha: Significance of each one-sided test.

    Raises:
        InputError: If a side cannot be read.
        UsageError: If both sides have no metric in common, or the margin makes no sense.
    """
    left, right = read_group(a), read_group(b)
    names = _common_metrics(left, right)
    if metric is not None and metric not in names:
        shared = ", ".join(names) or "none"
        message = f"the two sides do not share a metric {metric!r}: they share {shared}"
        raise UsageError(message)
    if not names:
        message = (
            f"{left.name} and {right.name} have no metric in common: log the same one on both sides"
        )
        raise UsageError(message)
    chosen = [metric] if metric is not None else names
    metrics = tuple(_compare_metric(left, right, name, margin, alpha) for name in chosen)
    shifts = _shifts(left, right)
    return Comparison(
        left, right, metrics, _curve(left, right), shifts, _findings(metrics, shifts, left, right)
    )


def _common_metrics(a: SeedGroup, b: SeedGroup) -> list[str]:
    sets = [set(t.metrics) for t in (*a.trainings, *b.trainings)]
    common = set.intersection(*sets)
    # The loss says little if there is a real metric, so it comes last.
    return sorted(common, key=lambda name: (name == "final loss", name))


def _compare_metric(
    a: SeedGroup, b: SeedGroup, name: str, margin: float | None, alpha: float
) -> MetricComparison:
    pairs = _paired(a, b)
    left, right = (
        tuple(t.metrics[name] for t in side)
        for side in (zip(*pairs, strict=True) if pairs else (a.trainings, b.trainings))
    )
    mean = (
        statistics.fmean(x for x in left if math.isfinite(x))
        if any(map(math.isfinite, left))
        else 0
    )
    width = margin if margin is not None else (DEFAULT_MARGIN * abs(mean) or DEFAULT_MARGIN)
    result = judge_equivalence(left, right, width, alpha=alpha, paired=bool(pairs))
    higher = a.trainings[0].higher_is_better.get(name, True)
    return MetricComparison(name, higher, left, right, result, margin is not None)


def _paired(a: SeedGroup, b: SeedGroup) -> list[tuple[Any, Any]]:
    """Pairs of trainings with the same seed, if both sides have the same seeds, each once."""
    left, right = ({t.seed: t for t in side.trainings} for side in (a, b))
    known = None not in left and set(left) == set(right)
    whole = len(left) == len(a.trainings) and len(right) == len(b.trainings)
    if not (known and whole):
        return []
    return [(left[seed], right[seed]) for seed in sorted(left, key=lambda s: s or 0)]


def _curve(a: SeedGroup, b: SeedGroup) -> Curve:
    common = set.intersection(*(set(t.losses) for t in (*a.trainings, *b.trainings)))
    worst: tuple[float, int] | None = None
    for step in common:
        gap = statistics.fmean(t.losses[step] for t in b.trainings) - statistics.fmean(
            t.losses[step] for t in a.trainings
        )
        if math.isfinite(gap) and (worst is None or abs(gap) > abs(worst[0])):
            worst = gap, step
    if worst is None:
        return Curve(len(common), None, 0.0, None)
    at = [t.losses[worst[1]] for t in a.trainings]
    spread = statistics.stdev(at) if len(at) > 1 else None
    return Curve(len(common), worst[1], worst[0], spread)


def _shifts(a: SeedGroup, b: SeedGroup) -> tuple[LayerShift, ...]:
    """Layers recorded on both sides, those that moved most first."""
    left, right = _mean_exponents(a), _mean_exponents(b)
    moved = [
        LayerShift(kind, name, right[kind, name] - left[kind, name])
        for kind, name in left.keys() & right.keys()
    ]
    return tuple(sorted(moved, key=lambda s: (-abs(s.octaves), s.kind, s.name)))


def _mean_exponents(side: SeedGroup) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = {}
    for t in side.trainings:
        for key, value in t.layers.items():
            found.setdefault(key, []).append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def _findings(
    metrics: Sequence[MetricComparison], shifts: Sequence[LayerShift], a: SeedGroup, b: SeedGroup
) -> tuple[Finding, ...]:
    found = [f for m in metrics if (f := _metric_finding(m)) is not None]
    for shift in shifts:
        if abs(shift.octaves) < OCTAVES:
            continue
        direction = "overflow" if shift.octaves > 0 else "underflow"
        found.append(
            Finding(
                severity="warning",
                code=f"layer-towards-{direction}",
                message=f"the largest {shift.kind.replace('_', ' ')} of "
                f"{shift.name or 'the model'} moved {abs(shift.octaves):.1f} octaves "
                f"towards {direction}",
                evidence={"kind": shift.kind, "name": shift.name, "octaves": shift.octaves},
                fix="analyze the new run: its loss scale and FP32 operations may have changed",
            )
        )
    lengths = [
        max((max(t.losses) + 1 for t in side.trainings if t.losses), default=0) for side in (a, b)
    ]
    if min(lengths) and min(lengths) < LENGTHS_ALIKE * max(lengths):
        found.append(
            Finding(
                severity="warning",
                code="lengths-differ",
                message=f"{b.name} trained {lengths[1]} steps and {a.name} {lengths[0]}",
                evidence={"a": lengths[0], "b": lengths[1]},
                fix="compare trainings of the same length",
            )
        )
    skipped = [sum(t.skipped for t in side.trainings) for side in (a, b)]
    if skipped[1] > skipped[0]:
        found.append(
            Finding(
                severity="info",
                code="more-skips",
                message=f"{skipped[1]} steps were skipped; the reference skipped {skipped[0]}",
                evidence={"a": skipped[0], "b": skipped[1]},
                fix="see the reasons in training.jsonl",
            )
        )
    return by_severity(found)


def _metric_finding(m: MetricComparison) -> Finding | None:
    r = m.result
    evidence = {"metric": m.metric, "a": list(m.a), "b": list(m.b), "margin": r.margin}
    if r.verdict == "different":
        severity = "error" if m.worse or math.isnan(r.difference) else "warning"
        message = f"{m.metric} differs by {r.difference:+.4g}, more than the margin {r.margin:.3g}"
        return Finding(
            severity=severity,  # type: ignore[arg-type]
            code="metric-different",
            message=message
            if not math.isnan(r.difference)
            else f"{m.metric} is not finite on one of the two sides",
            evidence=evidence,
            fix="train by a plan: mpdiag analyze the FP32 run, then MixedPrecision with its plan",
        )
    if r.verdict == "inconclusive" and math.isnan(r.difference):
        return Finding(
            severity="warning",
            code="metric-inconclusive",
            message=f"{m.metric} is not finite on either side: equally many trainings diverged",
            evidence=evidence,
            fix="check the data, the learning rate and the loss: the reference itself does not train",
        )
    if r.verdict == "inconclusive":
        alone = min(r.seeds) < 2
        beyond = alone and abs(r.difference) > r.margin
        return Finding(
            severity="warning" if beyond else "info",
            code="metric-inconclusive",
            message=f"{m.metric} differs by {r.difference:+.4g}"
            + (f", more than the margin {r.margin:.3g}, with a single seed" if beyond else "")
            + (
                " with a single seed, which does not show its spread"
                if alone and not beyond
                else ""
            ),
            evidence=evidence,
            fix="train 3 or more seeds on each side, with --out fp32/seed0, fp32/seed1 … "
            "fp16/seed0 …, and compare the folders fp32 and fp16"
            if alone
            else f"train {r.seeds_to_decide} seeds on each side"
            if r.seeds_to_decide
            else "choose another margin: the difference equals this one",
        )
    return None
