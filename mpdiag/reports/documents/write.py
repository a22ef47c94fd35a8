"""Writes reports: reads what a report is about, hands it to the page, saves the file."""

import os
from pathlib import Path

from mpdiag.analysis.analyzer import analyze
from mpdiag.files.paths import AnyPath, place
from mpdiag.precision.audit import audit_of_run
from mpdiag.reports.contents import read_contents
from mpdiag.reports.documents.markdown import run_markdown
from mpdiag.reports.documents.page import save
from mpdiag.reports.documents.run_report import run_page

REPORT = "report.html"


def write_report(run: str | os.PathLike[str], output: Path | None = None) -> AnyPath:
    """Write a run's report.

    Args:
        run: The run folder.
        output: Where to write; default: ``report.html`` in the run folder. A name that ends in
            ``.md`` gets Markdown.

    Returns:
        The file.

    Raises:
        InputError: If the run cannot be read.
        UsageError: If the file cannot be written.
    """
    analysis = analyze(run)
    path = output or place(run) / REPORT
    if path.suffix == ".md":
        return save(path, run_markdown(analysis, audit_of_run(analysis.run)))
    return save(path, run_page(read_contents(analysis)))
