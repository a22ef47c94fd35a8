"""What a notebook shows of an analysis and of a comparison, as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.display import notebook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.analysis.findings import Finding
    from mpdiag.plan import PrecisionPlan


def analysis_html(run: str, target: str, findings: Sequence[Finding], plan: PrecisionPlan) -> str:
    """Findings, most severe first, and the plan below."""
    return notebook.card(
        f"{run} in {target}",
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        plan._repr_html_(),
        mood=_worst(findings),
    )


def comparison_html(
    names: tuple[str, str],
    verdict: str,
    metrics: Sequence[tuple[str, float, float, str]],
    findings: Sequence[Finding],
) -> str:
    """The verdict, the metrics' means, and what there is to say."""
    rows = [(metric, f"{a:.4g}", f"{b:.4g}", judged) for metric, a, b, judged in metrics]
    moods = {"equivalent": "good", "different": "error"}
    return notebook.card(
        f"{names[1]} against {names[0]}: {verdict}",
        notebook.table(("metric", names[0], names[1], "verdict"), rows),
        notebook.items([(f.severity, f"{f.message}. {_sentence(f.fix)}") for f in findings]),
        mood=moods.get(verdict, "warning"),
    )


def _worst(findings: Sequence[Finding]) -> str:
    found = {f.severity for f in findings}
    return next((mood for mood in ("error", "warning") if mood in found), "good")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
