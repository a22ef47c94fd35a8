"""What ``audit`` prints: the precision of groups of parameters, what it does, what can be answered."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from mpdiag.precision.audit import Audit
from mpdiag.reports.text.tables import Fitted, add_findings, titled_rows
from mpdiag.runs.answers import Answer, Certainty
from mpdiag.runs.precision import LABELS

HEADINGS = {
    "stored": "stored",
    "forward": "forward",
    "weight_grad": "backward",
    "accumulated": "summed",
    "reduced": "reduced",
    "states": "states",
    "master": "master",
}
"""Of the columns of ``Audit.table`` that hold dtypes."""
CERTAINTIES: dict[Certainty, str] = {"exact": "exactly", "bound": "up to rounding", "no": "no"}
"""How a recording answers, in the order of the rows."""
_STYLES = {"exact": "green", "bound": "cyan", "no": "yellow"}
GROUPS = 10
"""Groups of parameters that are shown without ``-v``."""


def audit_text(audit: Audit, *, verbose: bool = False) -> Iterator[RenderableType]:
    """The page of ``mpdiag audit``.

    Args:
        audit: What was found.
        verbose: Every group of parameters, however many.
    """
    yield Text(audit.line, style="bold")
    shown = shown_columns(audit)
    table = Fitted(
        ("parameters", "elements", *(HEADINGS[name] for name in shown)),
        names=frozenset({"parameters"}),
        right=frozenset({"elements"}),
        spare=("elements",),
        boxed=False,
    )
    groups = audit.table if verbose else audit.table[:GROUPS]
    for row in groups:
        table.add_row(row["parameters"], f"{row['numel']:,}", *(label(row[n]) for n in shown))
    yield table
    more = len(audit.table) - len(groups)
    if more > 0:
        yield Text(f" and {more:,} smaller groups: -v", "dim")
    rows = titled_rows()
    for title, words in sources(audit):
        rows.add_row(title, Text(words))
    if audit.findings:
        rows.add_row("", "")
        add_findings(rows, audit.findings, whole=True)
    yield rows
    yield from answers_text(audit.answers)


def answers_text(answers: Sequence[Answer]) -> Iterator[RenderableType]:
    """Which questions a recording answers, with a heading."""
    yield Text("\nWhat this recording can answer", style="bold")
    rows = titled_rows()
    for certainty, questions, reason in answered(answers):
        rows.add_row(
            Text(CERTAINTIES[certainty], _STYLES[certainty]), Text(f"{questions}: {reason}")
        )
    yield rows


def shown_columns(audit: Audit) -> list[str]:
    """The columns of dtypes in which any group has one."""
    return [name for name in HEADINGS if any(row[name] for row in audit.table)]


def label(dtypes: str | None) -> str:
    """Dtypes as people write them; a dash for none."""
    return ", ".join(LABELS.get(d, d) for d in dtypes.split(", ")) if dtypes else "–"


def sources(audit: Audit) -> Iterator[tuple[str, str]]:
    """Who set the precision, and why nothing is said of a reduction: titles and words."""
    setters = dict.fromkeys(
        p.set_by for p in audit.parameters if p.set_by and p.set_by != "default"
    )
    if setters:
        yield "Set by", ", ".join(setters)
    reasons = dict.fromkeys(
        p.unknown["reduced"] for p in audit.parameters if "reduced" in p.unknown
    )
    if reasons:
        yield "Reduced", "; ".join(reasons)


def answered(answers: Iterable[Answer]) -> Iterator[tuple[Certainty, str, str]]:
    """How the recording answers which questions, and why; those with the same reason together."""
    together: dict[tuple[Certainty, str], list[str]] = {}
    for answer in sorted(answers, key=lambda a: list(CERTAINTIES).index(a.answer)):
        together.setdefault((answer.answer, answer.reason), []).append(answer.question)
    for (certainty, reason), questions in together.items():
        yield certainty, ", ".join(questions), reason
