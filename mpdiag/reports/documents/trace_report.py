"""The report of a trace, as HTML that opens offline or as Markdown: what the terminal says, to share.

It serves readers who do not have the trace: the verdict, what stands out, the operations whose fix
gains most, the kernels, and what changed since an earlier trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import in_markdown, sentence
from mpdiag.reports.documents import markdown
from mpdiag.reports.documents.page import PageTable, findings, page, text_table
from mpdiag.reports.text import gpu_profile as text
from mpdiag.reports.views.tensor_core_use import cause_rows
from mpdiag.reports.views.tensor_cores import headline, pictures
from mpdiag.reports.views.verdict import Fact
from mpdiag.tensorcores.usage.summary import GAPS, STEPS, gap_rows, step_rows
from mpdiag.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpdiag.tensorcores.profile_comparison import ProfileComparison
    from mpdiag.tensorcores.trace_profile import Profile

SHOWN = 30
"""Rows of a table; ``mpdiag profile --json`` has them all."""
_MORE = "{shown} of {all}; all of them with mpdiag profile --json"


@dataclass(frozen=True, eq=False)
class Since:
    """What changed since an earlier trace, and what that trace is called."""

    against: str
    change: ProfileComparison


def trace_page(profile: Profile, since: Since | None = None) -> str:
    """The whole document as HTML."""
    document = profile.to_json()
    return page(
        "trace.html.j2",
        Path(profile.path).name,
        pictures(".", document),
        tone="fine" if text.is_good(profile) else "warning",
        verdict=sentence(profile.verdict),
        facts=[
            Fact(label, f"{100 * share:.1f} %", "of kernel time", "")
            for label, share in headline(document)
        ],
        change=None if since is None else _change(since),
        summary=[sentence(words) for words in document["summary"]],
        causes=cause_rows(document),
        findings=findings(
            (f["severity"], f["message"], f["fix"], f["code"]) for f in profile.findings
        ),
        tables=list(_tables(profile)),
        provenance=_provenance(profile),
    )


def trace_markdown(profile: Profile, since: Since | None = None) -> str:
    """The whole document as Markdown."""
    return "\n\n".join(_paragraphs(profile, since)) + "\n"


def _change(since: Since) -> dict[str, Any]:
    change = since.change
    return {
        "against": since.against,
        "verdict": change.verdict,
        "classes": text_table(text.CLASSES, text.class_rows(change)),
        "moves": text_table(text.MOVES, text.move_rows(change), SHOWN),
    }


def _tables(profile: Profile) -> Iterator[tuple[str, PageTable]]:
    """Titles and tables."""
    if profile.operations:
        rows = text.operation_rows(profile)
        yield text.OPERATIONS_TITLE, _without_empty(text.OPERATIONS, rows)
    yield "Kernels by time", _without_empty(text.KERNELS, text.kernel_rows(profile))
    if profile.timeline is not None:
        if profile.timeline.steps:
            yield "Steps", text_table(STEPS, step_rows(profile.timeline), SHOWN, _MORE)
        if profile.timeline.longest:
            yield "Longest gaps", _without_empty(GAPS, gap_rows(profile.timeline))


def _without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    """The first rows of a table, without the columns that are empty throughout."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    return text_table([columns[i] for i in kept], cells, SHOWN, _MORE)


def _provenance(profile: Profile) -> str:
    return f"{text.provenance(profile)}; mpdiag {__version__}"


def _paragraphs(profile: Profile, since: Since | None) -> Iterator[str]:
    yield f"## {in_markdown(sentence(profile.verdict))}"
    document = profile.to_json()
    for words in document["summary"]:
        yield in_markdown(sentence(words))
    if causes := cause_rows(document):
        yield "### What each cause costs"
        yield "\n".join(f"- **{in_markdown(words)}** → {in_markdown(fix)}" for words, fix in causes)
    if since is not None:
        change = _change(since)
        yield f"**Since {in_markdown(since.against)}.** {in_markdown(change['verdict'])}"
        yield markdown.page_table(change["classes"])
        if change["moves"].rows:
            yield "### What moved"
            yield markdown.page_table(change["moves"])
    if profile.findings:
        yield "### Findings"
        yield "\n".join(
            f"- **{f['severity']}** {in_markdown(f['message'])} → {in_markdown(f['fix'])} "
            f"(`{f['code']}`)"
            for f in profile.findings
        )
    for title, table in _tables(profile):
        yield f"### {title}"
        yield markdown.page_table(table)
        if table.note:
            yield in_markdown(table.note)
    yield in_markdown(f"{_provenance(profile)}.")
