"""Writes reports: reads what a report is about, hands it to the page, saves the file."""

import os
from pathlib import Path

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.difference.diff import RunDifference
from mpdiag.files.paths import AnyPath, place
from mpdiag.precision.audit import audit_of_run
from mpdiag.reports.contents import read_contents
from mpdiag.reports.documents.markdown import run_markdown
from mpdiag.reports.documents.page import frame_table, page, save
from mpdiag.reports.documents.run_report import run_page
from mpdiag.reports.text.difference import difference_lines
from mpdiag.reports.views.difference import difference_picture

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


def write_difference(found: RunDifference, a: Path, b: Path, output: Path) -> AnyPath:
    """Write what ``mpdiag diff`` found of two runs into an HTML file.

    Raises:
        UsageError: If the file cannot be written.
    """
    title, lines = difference_lines(found, a, b)
    pictures = [] if found.agree is None else [difference_picture(found)]
    tables = [frame_table(picture.frame) for picture in pictures]
    return save(output, page("difference.html.j2", title, pictures, lines=lines, tables=tables))
