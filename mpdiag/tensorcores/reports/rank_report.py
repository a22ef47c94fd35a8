"""The report of several ranks' traces, as HTML or Markdown: who is slowest, and what each rank did."""

from __future__ import annotations

from pathlib import Path

from mpdiag.display.wording import sentence
from mpdiag.files.paths import AnyPath
from mpdiag.reports import terminal
from mpdiag.reports.documents import markdown
from mpdiag.reports.documents.page import PageTable, page, save, text_table
from mpdiag.tensorcores.reports.profile import LEGEND, RANKS, rank_rows
from mpdiag.tensorcores.timeline.ranks import RankComparison
from mpdiag.tensorcores.trace_analysis import profile_ranks, traces_in
from mpdiag.tensorcores.views.timeline import ranks
from mpdiag.version import __version__


def rank_page(folder: Path, found: RankComparison) -> str:
    """The whole document as HTML."""
    return page(
        "trace.html.j2",
        str(folder),
        [ranks(found.to_json())],
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
        markdown.escaped(sentence(LEGEND)),
        markdown.escaped(f"{folder}: {len(found.ranks)} traces; mpdiag {__version__}."),
    ]
    return "\n\n".join(parts) + "\n"


def _table(found: RankComparison) -> PageTable:
    return text_table(RANKS, rank_rows(found))


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
