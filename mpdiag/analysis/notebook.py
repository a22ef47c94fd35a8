"""What a notebook shows of an analysis and of a comparison, as HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.display import notebook, svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.analysis.findings import Finding
    from mpdiag.plan import PrecisionPlan


@dataclass(frozen=True)
class ComparedMetric:
    """One metric of two sides: means, the difference with its interval, the margin, the verdict."""

    name: str
    a: float
    b: float
    low: float
    difference: float
    high: float
    margin: float
    verdict: str
    seeds_to_decide: int | None


def analysis_html(
    run: str, target: str, findings: Sequence[Finding], plan: PrecisionPlan, picture: str
) -> str:
    """The verdict, the gradients before and after the scale, findings, the plan, the next step.

    Args:
        run: The recording's name.
        target: The format's name.
        findings: Most severe first.
        plan: The decisions.
        picture: Of ``gradients_svg``; "" for none.
    """
    return notebook.card(
        plan.verdict.text or f"{run} in {target}",
        notebook.note(f"{run} in {target}"),
        notebook.figure(picture),
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        *plan.notebook_parts({f.message for f in findings}),
        notebook.next_step(plan.next_call("analysis.plan")),
        mood=_worst(findings),
    )


def comparison_html(
    names: tuple[str, str],
    verdict: str,
    metrics: Sequence[ComparedMetric],
    findings: Sequence[Finding],
) -> str:
    """The verdict, the differences and their margins, the means, what to say, the next step."""
    rows = [(m.name, f"{m.a:.4g}", f"{m.b:.4g}", m.verdict) for m in metrics]
    moods = {"equivalent": "good", "different": "error"}
    drawn = [
        (m.name, *_interval(m), m.margin)
        for m in metrics
        if math.isfinite(m.difference) and m.margin > 0
    ]
    words = (
        f"Difference of {names[1]} from {names[0]}: dot, and its interval as a line where seeds give "
        "one; shaded: the margin"
    )
    return notebook.card(
        f"{names[1]} against {names[0]}: {verdict}",
        notebook.figure(svg.differences(drawn, words), words),
        notebook.table(("metric", names[0], names[1], "verdict"), rows),
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        notebook.next_step("", _after_comparison(verdict, metrics, findings)),
        mood=moods.get(verdict, "warning"),
    )


def _interval(m: ComparedMetric) -> tuple[float, float, float]:
    """Low end, difference, high end; the difference alone where one seed gives no interval."""
    known = math.isfinite(m.low) and math.isfinite(m.high)
    return (m.low, m.difference, m.high) if known else (m.difference,) * 3


def _after_comparison(
    verdict: str, metrics: Sequence[ComparedMetric], findings: Sequence[Finding]
) -> str:
    """What to do, in a sentence; "" where nothing is known to help."""
    needed = max((m.seeds_to_decide or 0 for m in metrics), default=0)
    if verdict == "inconclusive" and needed:
        return f"about {needed} seeds on each side would decide."
    fix = next((f.fix for f in findings if f.severity != "info" and f.fix), "")
    return _sentence(fix) if verdict != "equivalent" else ""


def _worst(findings: Sequence[Finding]) -> str:
    found = {f.severity for f in findings}
    return next((mood for mood in ("error", "warning") if mood in found), "good")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
