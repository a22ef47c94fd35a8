"""Writes reports: reads what a report is about, hands it to the page, saves the file."""

import os
from pathlib import Path

from mpdiag.analysis.analyzer import analyze
from mpdiag.files.paths import AnyPath, place
from mpdiag.precision.audit import audit_of_run
from mpdiag.reports.contents import read_contents
from mpdiag.reports.documents.markdown import run_markdown, run_picture
from mpdiag.reports.documents.page import save
from mpdiag.reports.documents.run_report import run_page

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
        picture = picture_beside(path, run_picture(analysis))
        return save(path, run_markdown(analysis, picture, audit_of_run(analysis.run)))
    return save(path, run_page(read_contents(analysis)))


def picture_beside(document: AnyPath, picture: str) -> str:
    """Write a document's picture beside it, under the same name; "" for no picture.

    Returns:
        The file's name.
    """
    if not picture:
        return ""
    path = document.with_suffix(".svg")
    save(path, picture)
    return path.name
