"""The report of a trace: one HTML file that opens offline, or Markdown; the same as the terminal's.

For whoever was not there when it was recorded: the verdict, what stands out, what is worth mending,
the kernels, and what changed since an earlier trace.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.reports import markdown, page, pictures, terminal
from mpdiag.reports import profile as text
from mpdiag.reports.frames.tensorcores import headline
from mpdiag.reports.words import in_markdown, sentence
from mpdiag.tensorcores.trace_analysis import STDIN, compare_traces, profile_trace
from mpdiag.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpdiag.tensorcores.profile_comparison import ProfileComparison
    from mpdiag.tensorcores.trace_profile import Profile

SHOWN = 30
"""Rows of a table; ``mpdiag profile --json`` has them all."""


def write_trace_report(
    trace: Path, output: Path | None = None, against: Path | None = None
) -> Path:
    """Write a trace's report.

    Args:
        trace: As for ``mpdiag profile``.
        output: Where to write; default: the trace's name and ``.html``, in the working folder. A
            name that ends in ``.md`` gets Markdown.
        against: An earlier trace to compare with.

    Returns:
        The file.

    Raises:
        InputError: If a trace cannot be read.
        UsageError: If the file cannot be written.
    """
    with terminal.waiting(f"reading {trace}"):
        profile = profile_trace(trace)
        change = None if against is None else compare_traces(against, profile)
    path = output or Path(f"{'stdin' if str(trace) == STDIN else trace.name}.html")
    parts = _markdown if path.suffix == ".md" else _html
    return page.save(path, parts(profile, change, against))


def _tables(profile: Profile) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, columns and rows."""
    if profile.operations:
        yield "Operations worth most", *_filled(text.OPERATIONS, text.operation_rows(profile))
    yield "Kernels by time", *_filled(text.KERNELS, text.kernel_rows(profile))


def _filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """A table without the columns that no row fills."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return tuple(columns[i] for i in kept), [[row[i] for i in kept] for row in rows]


def _more(rows: Sequence[object]) -> str:
    return f"{SHOWN} of {len(rows)}; all of them with mpdiag profile --json"


def _html(profile: Profile, change: ProfileComparison | None, against: Path | None) -> str:
    return page.document(f"{Path(profile.path).name} – mpdiag", _elements(profile, change, against))


def _elements(
    profile: Profile, change: ProfileComparison | None, against: Path | None
) -> Iterator[str]:
    escape, name = html.escape, Path(profile.path).name
    document = profile.to_json()
    yield f'<p class="eyebrow">mpdiag profile · {escape(name)}</p>'
    tone = "fine" if text.is_good(profile) else "warning"
    yield f'<h1 class="{tone}">{escape(sentence(profile.verdict))}</h1>'
    yield page.cards(
        (label, f"{100 * share:.1f} %", "of kernel time", "") for label, share in headline(document)
    )
    if change is not None:
        yield f"<h2>Since {escape(str(against))}</h2><p>{escape(change.verdict)}</p>"
        yield page.table(text.CLASSES, text.class_rows(change))
        if change.moves:
            yield "<h3>What moved</h3>" + page.table(text.MOVES, text.move_rows(change)[:SHOWN])
    if profile.findings:
        yield "<h2>Findings</h2>"
        for f in profile.findings:
            yield page.finding(f["severity"], f["message"], f["fix"], f["code"])
    for title, columns, rows in _tables(profile):
        yield f"<h2>{title}</h2>" + page.table(columns, rows[:SHOWN])
        if len(rows) > SHOWN:
            yield f'<p class="caption">{_more(rows)}</p>'
    yield "<h2>Evidence</h2>"
    for draw in (pictures.verdicts, pictures.kernels, pictures.roofline):
        yield page.picture(draw(".", document))
    yield (
        "<p class='caption'>The receipts read <code>profile.json</code>, which "
        f"<code>mpdiag profile {escape(name)} --json &gt; profile.json</code> writes.</p>"
    )
    yield f"<h2>Provenance</h2><p>{escape(text.provenance(profile))}; mpdiag {__version__}.</p>"


def _markdown(profile: Profile, change: ProfileComparison | None, against: Path | None) -> str:
    return "\n\n".join(_paragraphs(profile, change, against)) + "\n"


def _paragraphs(
    profile: Profile, change: ProfileComparison | None, against: Path | None
) -> Iterator[str]:
    yield f"## {in_markdown(sentence(profile.verdict))}"
    if change is not None:
        yield f"**Since {in_markdown(str(against))}.** {in_markdown(change.verdict)}"
        yield markdown.rows(text.CLASSES, text.class_rows(change))
        if change.moves:
            yield "### What moved"
            yield markdown.rows(text.MOVES, text.move_rows(change)[:SHOWN])
    if profile.findings:
        yield "### Findings"
        yield "\n".join(
            f"- **{f['severity']}** {in_markdown(f['message'])} → {in_markdown(f['fix'])} "
            f"(`{f['code']}`)"
            for f in profile.findings
        )
    for title, columns, rows in _tables(profile):
        yield f"### {title}"
        yield markdown.rows(columns, rows[:SHOWN])
        if len(rows) > SHOWN:
            yield in_markdown(_more(rows))
    yield in_markdown(f"{text.provenance(profile)}; mpdiag {__version__}.")
