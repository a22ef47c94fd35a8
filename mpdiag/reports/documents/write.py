"""Writes reports: reads what a report is about, hands it to the page, saves the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.analysis.analyzer import analyze
from mpdiag.files.paths import AnyPath, place
from mpdiag.reports import terminal
from mpdiag.reports.contents import read_contents
from mpdiag.reports.documents.markdown import run_markdown, run_picture
from mpdiag.reports.documents.page import save
from mpdiag.reports.documents.rank_report import rank_markdown, rank_page
from mpdiag.reports.documents.run_report import run_page
from mpdiag.reports.documents.trace_report import (
    Since,
    trace_markdown,
    trace_page,
    trace_picture,
)
from mpdiag.tensorcores.trace_analysis import (
    STDIN,
    compare_traces,
    profile_ranks,
    profile_trace,
    traces_in,
)

if TYPE_CHECKING:
    import os

REPORT = "report.html"


def write_report(run: str | os.PathLike[str], output: Path | None = None) -> AnyPath:
    """Write a run's report.

    Args:
        run: The run folder.
        output: Where to write; default: ``report.html`` in the run folder. A name that ends in
            ``.md`` gets Markdown, and a picture beside it.

    Returns:
        The file.

    Raises:
        InputError: If the run cannot be read.
        UsageError: If the file cannot be written.
    """
    analysis = analyze(run)
    path = output or place(run) / REPORT
    if path.suffix == ".md":
        return save(path, run_markdown(analysis, _picture_beside(path, run_picture(analysis))))
    return save(path, run_page(read_contents(analysis)))


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


def write_trace_report(
    trace: Path, output: Path | None = None, against: Path | None = None
) -> AnyPath:
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
        since = None if against is None else Since(str(against), compare_traces(against, profile))
    path = output or Path(f"{'stdin' if str(trace) == STDIN else trace.name}.html")
    if path.suffix == ".md":
        picture = _picture_beside(path, trace_picture(profile))
        return save(path, trace_markdown(profile, since, picture))
    return save(path, trace_page(profile, since))


def _picture_beside(document: AnyPath, picture: str) -> str:
    """Write a document's picture beside it, under the same name; "" for no picture.

    Returns:
        The file's name.
    """
    if not picture:
        return ""
    path = document.with_suffix(".svg")
    save(path, picture)
    return path.name
