"""The table of ``families.py``: the result of each way to train, workload by workload.

Pure functions: from figures by seed to verdicts, and from those to a table on the screen, to Markdown
and to JSON. ``families.py`` runs the trainings.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.text import Text

from mpdiag.analysis.comparison.equivalence import judge_equivalence
from mpdiag.analysis.comparison.rates import compare_rates
from mpdiag.analysis.layers import merge_layers, share
from mpdiag.analysis.scaling.necessity import lost_as_much, values_lost
from mpdiag.display.wording import percent
from mpdiag.files.documents import finite
from mpdiag.numerics.formats import FP16
from mpdiag.reports.text.tables import Fitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.analysis.layers import Layers
    from mpdiag.plan import PrecisionPlan
    from mpdiag.runs.run import Run

WAYS = {
    "fp32": "FP32",
    "fp16-no-scale": "FP16, no scale",
    "fp16-plan": "FP16 by the plan",
    "bf16": "BF16",
    "fp16-paper": "FP16, paper's scale",
}
"""Ways to train, in the order of the columns."""
FURTHEST = 20
"""How many doublings of the mean's elements ``onset`` tries."""


@dataclass(frozen=True)
class WayResult:
    """The result of one way to train, over seeds.

    Attributes:
        values: The metric of each seed, in the order of the seeds; NaN where training failed.
        skipped, steps: Steps skipped, and all of them, over all seeds.
        verdict: Against FP32, paired by seed: ``equivalent``, ``different`` or ``inconclusive``;
            empty for FP32 itself.
        difference, low, high: The mean difference from FP32 and its 90 % interval.
        seeds_to_decide: Seeds that would decide, if it is inconclusive; None: unknown.
        stopped: Why a training ended early; empty if none did.
    """

    values: tuple[float, ...]
    skipped: int = 0
    steps: int = 0
    verdict: str = ""
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    seeds_to_decide: int | None = None
    stopped: str = ""


@dataclass(frozen=True)
class Underflow:
    """Shares of non-zero activation gradients that FP16 makes 0, over all recorded steps.

    Attributes:
        predicted: From the FP32 recording's histograms, at the scale in use.
        observed: Counted in the FP16 training: zeros there that were none in FP32. This
            includes gradients that are 0 because those they are computed from were lost.
    """

    predicted: float
    observed: float | None


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        workload, family, metric, higher_is_better, margin: As the workload states them.
        steps, seeds: Of each training.
        sides: The result of each way, by its key in ``WAYS``; the name is the JSON document's.
        need, method, recommended, lower, upper: The plan's loss scale and its interval.
        paper_scale: The scale that the paper used; None if it names none.
        worst_lost: Share of Σ|gradient| that the worst layer loses late in training at scale 1.
        onset: How many times as many elements in the loss's mean (batch, positions, pixels) would
            make the worst layer lose enough to ruin the training; 1 if it does already, None if even
            2^20 times as many would not.
        underflow: By way, of the first seed.
        in_fp32: Modules and operations that the plan keeps in FP32 beyond the policy's lists.
        master_weights: Whether FP32 masters are needed.
        swallowed: Share of weight updates that would not change FP16 weights.
    """

    workload: str
    family: str
    metric: str
    higher_is_better: bool
    margin: float
    steps: int
    seeds: tuple[int, ...]
    sides: Mapping[str, WayResult]
    need: str
    method: str
    recommended: float
    lower: float
    upper: float | None
    paper_scale: float | None
    worst_lost: float
    onset: int | None
    underflow: Mapping[str, Underflow]
    in_fp32: tuple[str, ...]
    master_weights: bool
    swallowed: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite is null."""
        found: dict[str, Any] = finite(asdict(self))
        return {**found, "explanation": explain(self)}


def compare_way(
    reference: Sequence[float],
    values: Sequence[float],
    margin: float,
    *,
    skipped: int,
    steps: int,
    stopped: str = "",
) -> WayResult:
    """Compare one way with FP32, seeds paired.

    Args:
        reference: FP32's metric by seed.
        values: This way's, in the same order; no longer than the reference.
        margin: The largest difference that does not matter, in the metric's unit.
        skipped: Steps skipped.
        steps: All steps.
        stopped: Why a training ended early.
    """
    result = judge_equivalence(reference[: len(values)], values, margin, paired=True)
    broken = [sum(not math.isfinite(v) for v in side) for side in (reference, values)]
    verdict = result.verdict
    if any(broken):  # how many diverged decides, not by how much the others differ
        verdict = compare_rates((broken[0], broken[1]), (len(reference), len(values))).verdict
    return WayResult(
        tuple(values),
        skipped,
        steps,
        verdict,
        result.difference,
        result.low,
        result.high,
        result.seeds_to_decide,
        stopped,
    )


def onset(analysis: Analysis) -> int | None:
    """How many times as many elements in the loss's mean would make a scale needed.

    A loss that is a mean over N elements hands each a gradient of 1 / N. With 2^k times as many, all
    recorded gradients move k bins down, all else being equal.

    Args:
        analysis: Of an FP32 recording.

    Returns:
        A power of two; None if not even 2^20 would.
    """
    late = analysis.loss_scale.late
    h = late.histograms
    for k in range(FURTHEST + 1):
        sums = share(h.abs_sum(FP16.zero_exponent + k).value, h.abs_sum().value)
        if np.any(lost_as_much(values_lost(late, FP16, -k), sums)):
            return int(2**k)
    return None


def underflow(fp32: Run, fp16: Run | None, scale: float) -> Underflow:
    """Predicted and observed underflow of the activation gradients that both runs recorded.

    Args:
        fp32: The FP32 recording.
        fp16: A recording of the FP16 training, at the same steps; None if there is none.
        scale: The loss scale, a power of two.
    """
    exponent = round(math.log2(scale))
    before = merge_layers(fp32.records).of_kind("activation_grad")
    if fp16 is None:
        h = before.histograms
        return Underflow(_ratio(h.lost_to_zero(FP16, exponent).value.sum(), h.nonzero.sum()), None)
    steps = np.intersect1d(fp32.records.step, fp16.records.step)
    wide, narrow = (
        merge_layers(run.records, np.isin(run.records.step, steps)).of_kind("activation_grad")
        for run in (fp32, fp16)
    )
    wide, narrow = _common(wide, narrow), _common(narrow, wide)
    nonzero = int(wide.histograms.nonzero.sum())
    lost = wide.histograms.lost_to_zero(FP16, exponent).value.sum()
    kept = int(narrow.histograms.nonzero.sum())
    return Underflow(_ratio(lost, nonzero), 1 - kept / nonzero if nonzero else 0.0)


def _common(layers: Layers, other: Layers) -> Layers:
    from mpdiag.analysis.layers import Layers as Kept

    rows = np.flatnonzero(np.isin(layers.names.astype(str), other.names.astype(str)))
    return Kept(layers.kinds[rows], layers.names[rows], layers.histograms[rows], layers.steps[rows])


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def in_fp32(plan: PrecisionPlan) -> tuple[str, ...]:
    """What a plan itself keeps in FP32, as words."""
    choices = (*plan.fp32_modules, *plan.fp32_operations)
    return tuple(
        dict.fromkeys(f"{c.module or 'the model'}{f' ({c.op})' if c.op else ''}" for c in choices)
    )


# -- in words --------------------------------------------------------------------------------------


def explain(row: Family) -> str:
    """One sentence that says why a scale is or is not needed, from the recorded histograms."""
    lost = f"the worst layer loses {percent(row.worst_lost)} of its gradients' sum at scale 1"
    if row.need == "needed":
        return f"A scale is needed: {lost}."
    if row.onset is None:
        return f"No scale is needed: {lost}, and no larger mean would change that."
    return (
        f"{'A scale is recommended' if row.need == 'advisable' else 'No scale is needed'}: "
        f"{lost}; with {row.onset:,} times as many elements in the loss's mean one would be."
    )


def spread_text(result: WayResult) -> str:
    """Mean and standard deviation over seeds."""
    values = result.values
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "not finite"
    mean = statistics.fmean(values)
    return f"{mean:.4g} ± {statistics.stdev(values):.2g}" if len(values) > 1 else f"{mean:.4g}"


_SIGNS = {"equivalent": "=", "different": "≠", "inconclusive": "?"}


def way_text(row: Family, way: str) -> str:
    """One way's metric and verdict."""
    result = row.sides.get(way)
    if result is None or (not result.values and not result.stopped):
        return "–"
    if not result.values:
        return "did not run"
    sign = _SIGNS.get(result.verdict, "")
    return f"{spread_text(result)} {sign}".rstrip()


def scale_text(row: Family) -> str:
    """The recommended scale and its interval."""
    upper = "∞" if row.upper is None else _power(row.upper)
    scale = "none" if row.method == "none" else _power(row.recommended)
    return f"{scale} ({_power(row.lower)} to {upper})"


def _power(value: float) -> str:
    exponent = math.log2(value)
    return f"{value:g}" if value < 4096 else f"2^{exponent:g}"


def underflow_text(row: Family, way: str) -> str:
    """Predicted and observed, in percent."""
    found = row.underflow.get(way)
    if found is None:
        return "–"
    seen = "–" if found.observed is None else percent(found.observed, 1)
    return f"{percent(found.predicted, 1)} / {seen}"


def _cells(row: Family) -> list[str]:
    better = "" if row.higher_is_better else ", less is better"
    planned = row.sides.get("fp16-plan")
    return [
        row.workload,
        f"{row.metric}{better}",
        *(way_text(row, way) for way in WAYS),
        f"{row.margin:g}",
        scale_text(row),
        "–" if row.paper_scale is None else f"{row.paper_scale:g}",
        "–" if planned is None else f"{planned.skipped} of {planned.steps}",
        underflow_text(row, "fp16-no-scale"),
        underflow_text(row, "fp16-plan"),
        "; ".join(row.in_fp32) or "policy's lists",
    ]


HEADINGS = (
    "workload",
    "metric",
    *WAYS.values(),
    "margin",
    "scale (interval)",
    "paper",
    "skipped",
    "lost at 1",
    "lost at the scale",
    "in FP32",
)


BRIEF = ("workload", "metric", "FP32", "FP16, no scale", "FP16 by plan", "BF16", "scale")


def _brief_cells(row: Family) -> list[str]:
    """What decides: the mean of each way with its verdict, and the scale."""
    arrow = "↑" if row.higher_is_better else "↓"
    ways = [_brief(row, way) for way in ("fp32", "fp16-no-scale", "fp16-plan", "bf16")]
    scale = "none" if row.method == "none" else _power(row.recommended)
    return [row.workload, f"{row.metric} {arrow}", *ways, scale]


def _brief(row: Family, way: str) -> str:
    """As ``way_text``, without the spread."""
    mean, spread, rest = way_text(row, way).partition(" ± ")
    return f"{mean} {rest[-1]}" if spread and rest[-1] in _SIGNS.values() else mean


def families_text(rows: Sequence[Family], *, verbose: bool = False) -> RenderableType:
    """The table on the screen.

    Args:
        rows: A workload each.
        verbose: With every column, and a sentence for each row.
    """
    title = "Every family, every way to train"
    table = Fitted(BRIEF, title, right=frozenset(BRIEF[2:]), spare=("BF16",), lead=2, boxed=False)
    if verbose:
        table = Fitted(HEADINGS, title, sentences=frozenset({"in FP32"}), lead=2)
    for row in rows:
        table.add_row(*(_cells(row) if verbose else _brief_cells(row)))
    stops = [
        Text(f"{row.workload}, {WAYS[way]}: {result.stopped}", style="yellow")
        for row in rows
        for way, result in row.sides.items()
        if result.stopped
    ]
    if not verbose:
        more = "With -v: spread over seeds, margins, intervals, skipped steps, what is lost, why"
        return Group(table, Text(f"{ARROWS}; {SIGNS}"), *stops, Text(more, style="dim"))
    notes = [Text(f"{row.workload}: {explain(row)}") for row in rows]
    return Group(table, Text(LEGEND), *stops, Text(""), *notes)


ARROWS = "↑ more is better, ↓ less is better"
SIGNS = "= equivalent to FP32 within the margin, ≠ different, ? undecided with so few seeds"
LEGEND = (
    f"{SIGNS}; lost: share of activation gradients that FP16 makes 0, predicted from FP32 / observed "
    "in FP16"
)


def families_markdown(rows: Sequence[Family]) -> str:
    """The same table in Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", LEGEND + ".", ""])
