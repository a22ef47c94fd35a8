"""What ``audit`` prints: the precision of groups of parameters, what it does, what can be answered."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from mpdiag.precision.audit import Audit
from mpdiag.reports.text.tables import EXPLAIN, Fitted, finding_lines
from mpdiag.runs.precision import LABELS

_HEADINGS = {
    "stored": "stored",
    "forward": "forward",
    "weight_grad": "weight grad",
    "accumulated": "summed",
    "reduced": "reduced",
    "states": "states",
    "master": "master",
}


def audit_text(audit: Audit) -> Iterator[RenderableType]:
    """The page of ``mpdiag audit``."""
    yield Text(audit.line, style="bold")
    table = Fitted(
        ("parameters", "elements", *_HEADINGS.values()),
        names=frozenset({"parameters"}),
        right=frozenset({"elements"}),
        spare=("reduced", "master", "weight grad"),
        caption=_caption(audit),
        boxed=False,
    )
    for row in audit.table:
        cells = (_label(row[name]) for name in _HEADINGS)
        table.add_row(row["parameters"], f"{row['numel']:,}", *cells)
    yield table
    if audit.findings:
        yield ""
        yield from finding_lines(audit.findings)
        yield Text(EXPLAIN, "dim")
    yield ""
    yield from _answers(audit)


def _caption(audit: Audit) -> str:
    """Who set the precision, and why a column is empty."""
    setters = dict.fromkeys(
        p.set_by for p in audit.parameters if p.set_by and p.set_by != "default"
    )
    said = f"Set by: {', '.join(setters)}. " if setters else ""
    reasons = dict.fromkeys(
        p.unknown["reduced"] for p in audit.parameters if "reduced" in p.unknown
    )
    return said + (f"Reduced: {'; '.join(reasons)}." if reasons else "")


def _label(dtypes: str | None) -> str:
    return ", ".join(LABELS.get(d, d) for d in dtypes.split(", ")) if dtypes else "—"


def _answers(audit: Audit) -> Iterator[Text]:
    yield Text("What this recording can answer", style="bold")
    for answer in audit.answers:
        styles = {"exact": "green", "bound": "cyan", "no": "yellow"}
        yield Text.assemble(
            (f"{answer.answer:<6}", styles[answer.answer]), f"{answer.question}: {answer.reason}"
        )
