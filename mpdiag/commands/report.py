"""``mpdiag report``: verdict and evidence in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.shared.options import refuse_suffix
from mpdiag.errors import UsageError
from mpdiag.files.paths import AnyPath, is_remote, place


def report(
    run: Annotated[
        AnyPath,
        typer.Argument(
            metavar="RUN", parser=place, help="A run, its URL, a GPU's trace, or ranks' traces."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: in RUN, or TRACE.html; .md: Markdown."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", help="With a trace: what changed since this one?"),
    ] = None,
) -> None:
    """Write verdict and evidence into one HTML file, or Markdown."""
    from mpdiag.reports import next_commands, terminal
    from mpdiag.tensorcores.trace_analysis import holds_traces, is_trace

    if output is not None:
        refuse_suffix(output, "a report", (".html", ".htm", ".md"))
    if not is_remote(run) and against is None and holds_traces(run):
        from mpdiag.reports.documents.write import write_rank_report

        terminal.show(str(write_rank_report(run, output)))
        terminal.name_next(*next_commands.after_report(run))
    elif is_remote(run) or not is_trace(run):
        from mpdiag.reports.documents.write import write_report

        if against is not None:
            message = "--against compares traces: for two runs, mpdiag compare A B"
            raise UsageError(message)
        terminal.show(str(write_report(run, output)))
        terminal.name_next(*next_commands.look_beside(run))
    else:
        from mpdiag.reports.documents.write import write_trace_report

        terminal.show(str(write_trace_report(run, output, against)))
        terminal.name_next(*next_commands.after_report(run))
