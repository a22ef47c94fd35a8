"""``mpdiag report``: verdict and evidence in one file."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mpdiag.commands.shared.options import refuse_suffix
from mpdiag.errors import UsageError
from mpdiag.files.paths import AnyPath, is_remote, place


def report(
    run: Annotated[
        AnyPath,
        Argument(
            metavar="RUN",
            parser=place,
            help="A run, its URL, a GPU's trace, or traces of several ranks.",
        ),
    ],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .html or .md file. Default: in RUN, or TRACE.html.",
        ),
    ] = None,
    against: Annotated[
        Path | None, Option(metavar="TRACE", help="With a trace, show what changed since this one.")
    ] = None,
    triton_cache: Annotated[
        Path | None, Option(metavar="DIR", help="With a trace, where the code of its kernels is.")
    ] = None,
) -> None:
    """Write verdict and evidence into one HTML file, or Markdown."""
    from mpdiag.profiler import is_installed, part
    from mpdiag.reports import next_commands, terminal

    if output is not None:
        refuse_suffix(output, "a report", (".html", ".htm", ".md"))
    traces = part("trace_analysis") if is_installed() and not is_remote(run) else None
    alone = against is None and triton_cache is None
    if traces is not None and alone and traces.holds_traces(run):
        written = part("reports.trace_report").write_rank_report(run, output)
        terminal.show(str(written))
        terminal.name_next(*next_commands.after_report(run))
    elif traces is not None and traces.is_trace(run):
        written = part("reports.trace_report").write_trace_report(
            run, output, against, triton_cache
        )
        terminal.show(str(written))
        terminal.name_next(*next_commands.after_report(run))
    else:
        from mpdiag.reports.documents.write import write_report

        if against is not None:
            raise UsageError("--against compares traces: for two runs, mpdiag compare A B")
        if triton_cache is not None:
            raise UsageError("--triton-cache belongs to a trace: give one instead of a run")
        terminal.show(str(write_report(run, output)))
        terminal.name_next(*next_commands.look_beside(run))
