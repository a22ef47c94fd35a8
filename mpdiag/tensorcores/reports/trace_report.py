"""The report of a trace, as HTML that opens offline or as Markdown: what the terminal says, to share.

It serves readers who do not have the trace: the verdict, what stands out, the operations whose fix
gains most, the kernels, and what changed since an earlier trace.
Of several ranks: who is slowest, and what each rank did.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpdiag.display.wording import percent, sentence
from mpdiag.files.paths import AnyPath
from mpdiag.reports import terminal
from mpdiag.reports.documents import markdown
from mpdiag.reports.documents.page import PageTable, findings, page, save, text_table
from mpdiag.reports.views.verdict import Fact
from mpdiag.tensorcores.profile_comparison import ProfileComparison
from mpdiag.tensorcores.reports import gpu_profile as text
from mpdiag.tensorcores.reports.profile import LEGEND, RANKS, rank_rows
from mpdiag.tensorcores.summary import GAPS, STEPS, CauseGroup, gap_rows, step_rows
from mpdiag.tensorcores.timeline.ranks import RankComparison
from mpdiag.tensorcores.trace_analysis import (
    STDIN,
    compare_traces,
    profile_ranks,
    profile_trace,
    traces_in,
)
from mpdiag.tensorcores.trace_profile import Profile
from mpdiag.tensorcores.views.tensor_cores import headline, pictures
from mpdiag.version import __version__

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
    stands_alone = text.not_said(profile, profile.cause_groups, notes=True)
    return page(
        "trace.html.j2",
        Path(profile.path).name,
        pictures(".", document),
        tone="fine" if text.is_good(profile) else "warning",
        verdict=sentence(profile.verdict),
        facts=[
            Fact(label, percent(share, 1), "of kernel time", "")
            for label, share in headline(document)
        ],
        change=None if since is None else _change(since),
        summary=[sentence(words) for words in document["summary"]],
        causes=[_cause(profile, group) for group in profile.cause_groups],
        findings=findings(stands_alone),
        said=findings(f for f in profile.findings if f not in stands_alone),
        open_tables=[],
        tables=list(_tables(profile)),
        provenance=_provenance(profile),
    )


def _cause(profile: Profile, group: CauseGroup) -> dict[str, Any]:
    """What one cause costs, with its operations."""
    rows = text.operation_rows(profile, group.cause)
    same = len({row[text.OPERATIONS.index("fix")] for row in rows}) < 2  # said above the table
    return {
        "label": group.label,
        "words": group.sentence,
        "fix": sentence(group.advice),
        "percent": round(100 * min(1.0, group.share), 1),
        "operations": _filled(text.OPERATIONS, rows, {"cause", "fix"} if same else {"cause"}),
    }


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
        yield "All operations", _filled(text.OPERATIONS, rows, {"fix"})  # which the causes have
    yield "Kernels by time", _filled(text.KERNELS, text.kernel_rows(profile))
    if fused := text.fused_rows(profile):
        yield text.FUSED_TITLE, _filled(text.FUSED, fused)
    if profile.timeline is not None:
        if profile.timeline.steps:
            yield "Steps", text_table(STEPS, step_rows(profile.timeline), SHOWN, _MORE)
        if profile.timeline.longest:
            yield "Longest gaps", _filled(GAPS, gap_rows(profile.timeline))


def _filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]], without: Collection[str] = ()
) -> PageTable:
    """The first rows of a table, without some columns and those that are empty throughout."""
    kept = [i for i, name in enumerate(columns) if name not in without and any(r[i] for r in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    return text_table([columns[i] for i in kept], cells, SHOWN, _MORE)


def _provenance(profile: Profile) -> str:
    return f"{text.provenance(profile)}; mpdiag {__version__}"


def _paragraphs(profile: Profile, since: Since | None) -> Iterator[str]:
    escaped = markdown.escaped
    yield f"## {escaped(Path(profile.path).name)}"
    yield f"**{escaped(sentence(profile.verdict))}**"
    document = profile.to_json()
    for words in document["summary"]:
        yield escaped(sentence(words))
    if since is not None:
        change = _change(since)
        yield f"### Since {escaped(since.against)}"
        yield escaped(change["verdict"])
        yield markdown.page_table(change["classes"])
        if change["moves"].rows:
            yield "### What moved"
            yield markdown.page_table(change["moves"])
    causes = [_cause(profile, group) for group in profile.cause_groups]
    if causes:
        yield f"### {text.OPERATIONS_TITLE}"
    for cause in causes:
        yield f"- **{escaped(cause['words'])}** → {escaped(cause['fix'])}"
        table = cause["operations"]
        words = f"{cause['label']}: {table.extent}"
        yield markdown.folded(words, markdown.page_table(table))
    if profile.findings:
        yield "### Findings"
        yield markdown.findings_list(profile.findings)
    for title, table in _tables(profile):
        yield markdown.folded(f"{title}: {table.extent}", markdown.page_table(table))
    yield escaped(f"{_provenance(profile)}.")


def write_trace_report(
    trace: Path,
    output: Path | None = None,
    against: Path | None = None,
    triton_code: Path | None = None,
) -> AnyPath:
    """Write a trace's report.

    Args:
        trace: As for ``mpdiag profile``.
        output: Where to write; default: the trace's name and ``.html``, in the working folder. A
            name that ends in ``.md`` gets Markdown.
        against: An earlier trace to compare with.
        triton_code: As for ``profile_trace``.

    Returns:
        The file.

    Raises:
        InputError: If a trace cannot be read.
        UsageError: If the file cannot be written.
    """
    with terminal.waiting(f"reading {trace}"):
        profile = profile_trace(trace, triton_code=triton_code)
        since = None if against is None else Since(str(against), compare_traces(against, profile))
    path = output or Path(f"{'stdin' if str(trace) == STDIN else trace.name}.html")
    if path.suffix == ".md":
        return save(path, "\n\n".join(_paragraphs(profile, since)) + "\n")
    return save(path, trace_page(profile, since))


def rank_page(folder: Path, found: RankComparison) -> str:
    """The whole document as HTML."""
    return page(
        "trace.html.j2",
        str(folder),
        [],
        tone="fine",
        verdict=sentence(found.verdict),
        facts=[],
        change=None,
        summary=[],
        causes=[],
        findings=[],
        said=[],
        open_tables=[("Ranks", _table(found))],
        tables=[],
        provenance=f"{folder}: {len(found.ranks)} traces; mpdiag {__version__}",
    )


def rank_markdown(folder: Path, found: RankComparison) -> str:
    """The whole document as Markdown."""
    parts = [
        f"## {markdown.escaped(folder.resolve().name)}",
        f"**{markdown.escaped(sentence(found.verdict))}**",
        markdown.page_table(_table(found)),
        markdown.escaped(f"{folder}: {len(found.ranks)} traces; mpdiag {__version__}."),
    ]
    return "\n\n".join(parts) + "\n"


def _table(found: RankComparison) -> PageTable:
    return replace(text_table(RANKS, rank_rows(found)), note=sentence(LEGEND))


def write_rank_report(folder: Path, output: Path | None = None) -> AnyPath:
    """Write the report of a folder that holds a trace of each rank of a run.

    Args:
        folder: With the traces.
        output: Where to write; default: the folder's name and ``.html``, in the working folder.

    Returns:
        The file.

    Raises:
        InputError: If a trace cannot be read.
        UsageError: If they are not of one run, or the file cannot be written.
    """
    with terminal.waiting(f"reading {folder}"):
        found = profile_ranks(traces_in(folder))
    path = output or Path(f"{folder.resolve().name}.html")
    document = rank_markdown if path.suffix == ".md" else rank_page
    return save(path, document(folder, found))
