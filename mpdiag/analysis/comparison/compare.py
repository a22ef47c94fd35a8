"""``compare``: FP32 against mixed precision, over seeds: metrics, curves, layers."""

import ast
import math
import os
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpdiag.analysis.comparison.comparison_findings import (
    ONE_SEED,
    Answer,
    Curve,
    LayerShift,
    MetricComparison,
    began_alike,
    comparison_findings,
    deciding,
    farthest_ahead,
    hindered,
    hinders,
    metric_not_logged,
)
from mpdiag.analysis.comparison.equivalence import (
    EquivalenceVerdict,
    judge_equivalence,
    judge_family,
)
from mpdiag.analysis.comparison.groups import SeedGroup, SeedTraining, read_group
from mpdiag.analysis.comparison.margins import (
    Margin,
    default_margin,
    given_margin,
    known_margin,
    metric_kind,
)
from mpdiag.analysis.comparison.models import ModelRelation, relate_models
from mpdiag.analysis.comparison.rates import RateComparison, compare_rates
from mpdiag.analysis.findings import Finding
from mpdiag.analysis.notebook import comparison_html
from mpdiag.errors import InputError, UsageError
from mpdiag.files.documents import finite
from mpdiag.files.paths import is_remote, place
from mpdiag.runs.run import META, list_runs, open_run
from mpdiag.runs.training_log import FINAL_LOSS

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``."""

    a: SeedGroup
    b: SeedGroup
    metrics: tuple[MetricComparison, ...]
    curve: Curve
    shifts: tuple[LayerShift, ...]
    findings: tuple[Finding, ...]
    divergence: RateComparison
    models: ModelRelation | None

    @property
    def different_models(self) -> bool:
        """Whether the two sides trained different models."""
        return self.models is not None and self.models.different

    @property
    def verdict(self) -> EquivalenceVerdict:
        """Different if any metric or the rate of divergence is, equivalent if all metrics are.

        Where b diverged more often than a it is never equivalent.
        """
        found = {m.result.verdict for m in self.metrics}
        if "different" in found or self.divergence.verdict == "different":
            return "different"
        if self.divergence.more_in_b:
            return "inconclusive"
        return "equivalent" if found == {"equivalent"} else "inconclusive"

    @property
    def answer(self) -> Answer:
        """The verdict; with one seed on a side the answer of the metrics that decide.

        The final loss decides only where both sides share no other metric. Two sides that cannot be
        compared answer nothing (see ``hindrances``).
        """
        if min(self.divergence.seeds) > 1:
            return self.verdict
        if self.divergence.any and all(m.comparable for m in self.metrics):
            return "worse (one seed)" if self.divergence.more_in_b else "undecided (one seed)"
        found = {m.answer for m in deciding(self.metrics)}
        return next(answer for answer in ONE_SEED if answer in found)

    @property
    def hindrances(self) -> tuple[Finding, ...]:
        """Why the two sides cannot be compared, which is said before any answer."""
        return tuple(f for f in self.findings if hinders(f))

    @property
    def undecided(self) -> bool:
        """Whether the answer is that there is none yet."""
        return self.answer in ("inconclusive", "undecided (one seed)")

    def __repr__(self) -> str:
        return f"<Comparison of {self.a.name!r} and {self.b.name!r}: {self.answer}>"

    def _repr_html_(self) -> str:
        """The verdict and the metrics in a notebook."""
        names = (self.a.name, self.b.name)
        return comparison_html(names, self.answer, self.metrics, self.findings)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag compare --json``; what is not finite is null."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "a": {"name": self.a.name, "seeds": [t.seed for t in self.a.trainings]},
            "b": {"name": self.b.name, "seeds": [t.seed for t in self.b.trainings]},
            "verdict": self.verdict,
            "answer": self.answer,
            "different_models": self.different_models if self.models else None,
            "divergence": self.divergence.to_json(),
            "metrics": [
                {
                    "metric": m.metric,
                    "answer": m.answer,
                    "higher_is_better": m.higher_is_better,
                    "a": list(m.a),
                    "b": list(m.b),
                    "margin_given": m.margin_given,
                    "margin_kind": m.margin.kind or "given",
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
    margin: float | Mapping[str, float] | None = None,
    alpha: float = 0.05,
) -> Comparison:
    """Compare two trainings, or two sets of seeds.

    Args:
        a: The reference (FP32): a run folder, a folder of runs, or a baseline file.
        b: The candidate: the same kinds of paths.
        metric: Compare only this metric. Default: all metrics that both sides have.
        margin: The largest difference that does not matter, in the metric's own units: one number,
            or a dict by metric. Default: the run's own, else the spread of its FP32 seeds, else that
            of the metric's kind. The result says which one was used.
        alpha: The chance of any wrong verdict, over all metrics and the divergence rates.

    Raises:
        InputError: If a side cannot be read, or claims half precision and did not run in it.
        UsageError: If the sides share no metric, or a margin is invalid.
    """
    left, right = read_group(a), read_group(b)
    for side in (a, b):
        refuse_unused_precision(side)
    found = compare_groups(left, right, metric=metric, margin=margin, alpha=alpha)
    only_loss = [m.metric for m in found.metrics] == [FINAL_LOSS]
    word = printed_metric(a) if only_loss and not found.hindrances else ""
    tip = (metric_not_logged(word),) if word else ()
    return replace(found, findings=(*found.findings, *tip))


def compare_groups(
    left: SeedGroup,
    right: SeedGroup,
    *,
    metric: str | None = None,
    margin: float | Mapping[str, float] | None = None,
    alpha: float = 0.05,
) -> Comparison:
    """As ``compare``, of groups that were read."""
    names = _common_metrics(left, right)
    if metric is not None and metric not in names:
        shared = ", ".join(names) or "none"
        raise UsageError(f"the two sides do not share a metric {metric!r}: they share {shared}")
    if not names:
        relation = relate_models(left.model, right.model)
        other = ""
        if relation is not None and relation.different:
            other = f" and are trainings of two different models ({relation.words})"
        raise UsageError(
            f"{left.name} and {right.name} have no metric in common{other}: log the same one on "
            "both sides"
        )
    chosen = [metric] if metric is not None else names
    broken = [[_diverged(t, chosen) for t in side.trainings] for side in (left, right)]
    divergence = compare_rates(
        (sum(broken[0]), sum(broken[1])), (len(broken[0]), len(broken[1])), alpha
    )
    drafts = [
        _Draft(
            name,
            *_values(left, right, name, chosen),
            given_margin(margin, name, chosen) or _brought(left, right, name),
            _start(left) if name == FINAL_LOSS else 0.0,
        )
        for name in chosen
    ]
    metrics, divergence = _judge(left, drafts, divergence, alpha)
    if len(left.trainings) == len(right.trainings) == 1:
        ahead = farthest_ahead(left.trainings[0].losses, right.trainings[0].losses)
        metrics = tuple(replace(m, ahead=ahead) if m.metric == FINAL_LOSS else m for m in metrics)
    shifts = _shifts(left, right)
    models = relate_models(left.model, right.model)
    if hindered(left, right, models):
        metrics = tuple(replace(m, comparable=False) for m in metrics)
    elif not began_alike(left, right):  # which may have helped the candidate
        good = ("as FP32 (one seed)", "better (one seed)")
        metrics = tuple(replace(m, comparable=m.answer not in good) for m in metrics)
    findings = comparison_findings(metrics, divergence, models, shifts, (left, right))
    curve = _curve(left, right)
    return Comparison(left, right, metrics, curve, shifts, findings, divergence, models)


def _brought(a: SeedGroup, b: SeedGroup, name: str) -> Margin | None:
    """The margin of a metric that the reference brings along, not from the candidate's values."""
    own = (t.margins[name] for t in a.trainings if name in t.margins)
    others = {t.folder for t in b.trainings if t.folder}
    seeds = [t.metrics.get(name, math.nan) for t in a.fp32_seeds if t.folder not in others]
    return known_margin(next(own, None), [v for v in seeds if math.isfinite(v)])


def _start(side: SeedGroup) -> float:
    """The mean of the first finite losses of a side's trainings; 0 where none was logged."""
    logged = ([v for _, v in sorted(t.losses.items()) if math.isfinite(v)] for t in side.trainings)
    first = [losses[0] for losses in logged if losses]
    return math.fsum(first) / len(first) if first else 0.0


def _common_metrics(a: SeedGroup, b: SeedGroup) -> list[str]:
    """The metrics of all trainings; one that diverged may lack some that others have."""
    sound = ([t for t in side.trainings if not t.diverged] or side.trainings for side in (a, b))
    common = set.intersection(*(set(t.metrics) for trainings in sound for t in trainings))
    # The loss says little if there is a real metric, so it comes last.
    return sorted(common, key=lambda name: (name == FINAL_LOSS, name))


def _diverged(training: SeedTraining, metrics: Collection[str]) -> bool:
    """Whether a training diverged, as far as it says itself or these metrics show."""
    values = [training.metrics.get(name, math.nan) for name in metrics]
    return training.diverged or not all(map(math.isfinite, values))


@dataclass(frozen=True)
class _Draft:
    """A metric's values, before they are judged."""

    name: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    sound_a: tuple[float, ...]
    sound_b: tuple[float, ...]
    paired: bool
    given: Margin | None
    start: float


def _values(
    a: SeedGroup, b: SeedGroup, name: str, metrics: Collection[str]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...], bool]:
    """All values of both sides, those of trainings that did not diverge, and whether they are pairs.

    A pair of which one diverged is no pair any more. Where fewer than two are left the seeds are
    compared as two sides.
    """
    pairs = _paired(a, b)
    left, right = zip(*pairs, strict=True) if pairs else (a.trainings, b.trainings)
    values = [tuple(t.metrics.get(name, math.nan) for t in side) for side in (left, right)]
    sound = [(x, y) for x, y in pairs if not (_diverged(x, metrics) or _diverged(y, metrics))]
    if sound and len(sound) >= min(2, len(pairs)):
        kept = [tuple(t.metrics[name] for t in side) for side in zip(*sound, strict=True)]
        return values[0], values[1], kept[0], kept[1], True
    kept = [
        tuple(t.metrics[name] for t in side if not _diverged(t, metrics)) for side in (left, right)
    ]
    return values[0], values[1], kept[0], kept[1], False


def _judge(
    reference: SeedGroup, drafts: Sequence[_Draft], divergence: RateComparison, alpha: float
) -> tuple[tuple[MetricComparison, ...], RateComparison]:
    """All verdicts at one level for the whole family of metrics and rates."""
    higher = {
        name: better for t in reference.trainings for name, better in t.higher_is_better.items()
    }
    first = [_compare_metric(d, higher.get(d.name, True), alpha) for d in drafts]
    testable = [i for i, m in enumerate(first) if math.isfinite(m.result.low)]
    rates = [divergence.p_value] if divergence.any else []
    levels = judge_family([first[i].result for i in testable], alpha, rates)
    level = dict(zip(testable, levels, strict=False))
    judged = [
        _compare_metric(d, higher.get(d.name, True), level.get(i, alpha))
        for i, d in enumerate(drafts)
    ]
    if rates and levels[-1] != alpha:
        divergence = compare_rates(divergence.diverged, divergence.seeds, levels[-1])
    return tuple(judged), divergence


def _compare_metric(draft: _Draft, higher: bool, alpha: float) -> MetricComparison:
    margin = draft.given or default_margin(
        draft.name, draft.sound_a, draft.sound_b, higher_is_better=higher, start=draft.start
    )
    sides = (draft.sound_a, draft.sound_b)
    if not all(sides):  # a whole side diverged
        sides = ((math.nan,), (math.nan,))
    result = judge_equivalence(*sides, margin.width, alpha=alpha, paired=draft.paired)
    if margin.provisional:  # nobody knows how much matters, so nothing is within it
        verdict: EquivalenceVerdict = (
            "inconclusive" if result.verdict == "equivalent" else result.verdict
        )
        result = replace(result, verdict=verdict, p_equivalent=1.0)
    return MetricComparison(draft.name, higher, draft.a, draft.b, result, margin)


def _paired(a: SeedGroup, b: SeedGroup) -> list[tuple[Any, Any]]:
    """Pairs of trainings with the same seed, if both sides have the same seeds, each once."""
    left, right = ({t.seed: t for t in side.trainings} for side in (a, b))
    known = None not in left and set(left) == set(right)
    whole = len(left) == len(a.trainings) and len(right) == len(b.trainings)
    if not (known and whole):
        return []
    return [(left[seed], right[seed]) for seed in sorted(left, key=lambda s: s or 0)]


def _curve(a: SeedGroup, b: SeedGroup) -> Curve:
    """Of the trainings that did not diverge, on a side that has any."""
    sides = [[t for t in g.trainings if not t.diverged] or list(g.trainings) for g in (a, b)]
    common = set.intersection(*(set(t.losses) for t in (*sides[0], *sides[1])))
    worst: tuple[float, int] | None = None
    for step in common:
        gap = statistics.fmean(t.losses[step] for t in sides[1]) - statistics.fmean(
            t.losses[step] for t in sides[0]
        )
        if math.isfinite(gap) and (worst is None or abs(gap) > abs(worst[0])):
            worst = gap, step
    if worst is None:
        return Curve(len(common), None, 0.0, None)
    at = [t.losses[worst[1]] for t in sides[0]]
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


def refuse_unused_precision(path: str | os.PathLike[str]) -> None:
    """Refuse a run that was trained by a plan for half precision, and of which nothing ran in it.

    FP32 against FP32 stays a fair question: a recording, or a training at O0, claims nothing.

    Args:
        path: A run folder, a folder of runs, or a baseline file, which is not looked at.

    Raises:
        InputError: Naming the run.
    """
    where = place(path)
    if where.is_file():
        return
    if (where / META).is_file():
        runs = [open_run(where)]
    else:
        runs = [item.run for item in list_runs(where) if item.run is not None]
    for run in runs:
        unused = unused_precision(run.meta)
        if unused:
            raise InputError(
                f"{run.folder} {unused}, so this would compare FP32 with FP32: train it again, with the "
                "model's computation where mpdiag train or mp.autocast() can cast it"
            )


def unused_precision(meta: Mapping[str, Any]) -> str:
    """Say that a run claims half precision and that nothing ran in it; empty if neither is known."""
    training = meta.get("training")
    if not isinstance(training, dict) or training.get("level") == "O0":
        return ""
    claimed = str(training.get("dtype") or "")
    if not claimed or meta.get("half_precision_flops") != 0:
        return ""
    return f"claims {claimed}, and none of its matrix products ran in it"


_MOST_BYTES = 1_000_000
_NAME = r"[A-Za-z][\w@.]*"


def printed_metric(path: str | os.PathLike[str]) -> str:
    """The metric that a run's script prints; "" where none is found or the script is not here.

    Args:
        path: A run folder; any other place gives "".
    """
    where = place(path)
    if is_remote(where) or not (where / META).is_file():
        return ""
    try:
        words = open_run(where).script_words
        script = Path(words[0]) if words else None
        if words[:1] == ("-m",):
            place_of = Path(*words[1].split("."))
            script = place_of / "__main__.py" if place_of.is_dir() else place_of.with_suffix(".py")
        if script is None or script.stat().st_size > _MOST_BYTES:
            return ""
        return _metric_in(script.read_text(encoding="utf-8"))
    except (InputError, OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""  # it cannot be read, is no Python, or is nested deeper than Python's parser goes


def _metric_in(source: str) -> str:
    """The first score or error rate that a source text prints; "" for none."""
    for call in ast.walk(ast.parse(source)):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "print"
        ):
            shown = " ".join(_shown(argument) for argument in call.args)
            # A name and then its value: "acc {…}", "accuracy: %.3f". Words alone are prose.
            for name in re.findall(rf"({_NAME})[^\w{{%]*[{{%]", shown):
                kinds = {metric_kind(name, (), higher_is_better=better) for better in (True, False)}
                if kinds & {"score", "error rate", "decibel"}:
                    return str(name)
    return ""


def _shown(node: ast.expr) -> str:
    """The text that an argument prints, ``{}`` in place of each value.

    Of a dict that is written there, also in ``json.dumps`` or ``dict(…)``: its names and values.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shown(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _shown(node.left)
    if isinstance(node, ast.Dict):
        return " ".join(f"{_shown(key)}: {{}}" for key in node.keys if key is not None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "dumps" and node.args:
            return _shown(node.args[0])
        return _shown(node.func.value) if node.func.attr == "format" else "{}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return " ".join(f"{word.arg}: {{}}" for word in node.keywords if word.arg)
    return "{}"
