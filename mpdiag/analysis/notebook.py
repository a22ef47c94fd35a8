"""What a notebook shows of an analysis and of a comparison, as HTML."""

import math
from collections.abc import Sequence

from mpdiag.analysis.comparison.comparison_findings import MetricComparison, mean_of_finite
from mpdiag.analysis.comparison.equivalence import Equivalence
from mpdiag.analysis.findings import Finding
from mpdiag.display import notebook
from mpdiag.plan import PrecisionPlan


def analysis_html(run: str, target: str, findings: Sequence[Finding], plan: PrecisionPlan) -> str:
    """The verdict, findings (the most severe first), the plan, the next step."""
    return notebook.card(
        plan.verdict.text or f"{run} in {target}",
        notebook.note(f"{run} in {target}"),
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        *plan.notebook_parts({f.message for f in findings}),
        notebook.next_step(plan.next_call("analysis.plan")),
        mood=_worst(findings),
    )


def comparison_html(
    names: tuple[str, str],
    verdict: str,
    metrics: Sequence[MetricComparison],
    findings: Sequence[Finding],
) -> str:
    """The verdict, the differences and their margins, the means, what to say, the next step."""
    rows = [
        (
            m.metric,
            *(f"{mean_of_finite(side):.4g}" for side in (m.a, m.b)),
            _difference(m.result),
            f"{m.result.margin:.4g}",
            m.answer,
        )
        for m in metrics
    ]
    moods = {
        "equivalent": "good",
        "as FP32 (one seed)": "good",
        "better (one seed)": "good",
        "different": "error",
        "worse (one seed)": "error",
    }
    return notebook.card(
        f"{names[1]} against {names[0]}: {verdict}",
        notebook.table(("metric", *names, "difference", "margin", "verdict"), rows),
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        notebook.next_step("", _after_comparison(verdict, metrics, findings)),
        mood=moods.get(verdict, "warning"),
    )


def _difference(r: Equivalence) -> str:
    """The difference, with its interval where seeds give one."""
    known = math.isfinite(r.low) and math.isfinite(r.high)
    return f"{r.difference:+.3g}" + (f" ({r.low:+.3g} to {r.high:+.3g})" if known else "")


def _after_comparison(
    verdict: str, metrics: Sequence[MetricComparison], findings: Sequence[Finding]
) -> str:
    """What to do, in a sentence; "" where nothing is known to help."""
    needed = max((m.result.seeds_to_decide or 0 for m in metrics), default=0)
    if verdict == "inconclusive" and needed:
        return f"about {needed} seeds on each side would decide."
    fix = next((f.fix for f in findings if f.severity != "info" and f.fix), "")
    return _sentence(fix) if verdict != "equivalent" else ""


def _worst(findings: Sequence[Finding]) -> str:
    found = {f.severity for f in findings}
    return next((mood for mood in ("error", "warning") if mood in found), "good")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
