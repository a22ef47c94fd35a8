"""``runs``, ``report``, ``dashboard`` and ``doctor``: what there is to see."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.base import JsonOption, app
from mpdiag.errors import UsageError
from mpdiag.files.paths import is_remote, place


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=place, help="A run, its URL, or a GPU's trace.")
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
    from mpdiag.reports import terminal
    from mpdiag.tensorcores.profile import is_trace

    if is_remote(run) or not is_trace(run):
        from mpdiag.reports.documents.write import write_report

        if against is not None:
            message = "--against compares traces: for two runs, mpdiag compare A B"
            raise UsageError(message)
        terminal.show(str(write_report(run, output)))
        terminal.name_next("mpdiag", "dashboard", run.parent)
    else:
        from mpdiag.reports.documents.write import write_trace_report

        terminal.show(str(write_trace_report(run, output, against)))


@app.command()
def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[RUNS]", help="A folder of runs; default: the sample runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens.")] = 8501,
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
) -> None:
    """Look at runs in a browser."""
    from mpdiag.launching.dashboard import serve

    raise typer.Exit(serve(folder, port, browser=browser))


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=place, help="The folder that holds the runs.")
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, newest first."""
    from mpdiag.reports import terminal
    from mpdiag.reports.text.runs import runs_json, runs_table
    from mpdiag.runs.run import list_runs

    found = list_runs(folder)
    if as_json:
        terminal.show_json(runs_json(found))
    elif found:
        terminal.show(runs_table(found))
        recorded = next((item for item in found if item.run and item.run.parts()), None)
        terminal.name_next("mpdiag", "analyze", recorded.folder if recorded else found[0].folder)
    else:
        terminal.show(f"no runs in {folder}")
        terminal.name_next("mpdiag", "demo")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed here, which devices, what is missing."""
    from mpdiag.installation.extras import EXTRAS
    from mpdiag.reports import terminal
    from mpdiag.reports.machine import examine
    from mpdiag.reports.text.doctor import environment_text

    environment = examine()
    if as_json:
        terminal.show_json(environment.to_json())
    else:
        terminal.show(environment_text(environment))
        demo = EXTRAS["demo"]
        install = shlex.split(demo.install)
        terminal.name_next(*(install if demo.missing() else ("mpdiag", "demo")))
