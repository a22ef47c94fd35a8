"""``runs``, ``report``, ``dashboard`` and ``doctor``: what there is to see."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.base import (
    JsonOption,
    RunArgument,
    app,
)
from mpdiag.places import place


@app.command()
def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: in RUN; .md for Markdown."),
    ] = None,
) -> None:
    """Write verdict and evidence into one HTML file, or Markdown."""
    from mpdiag.reports import terminal
    from mpdiag.reports.html import write_report

    path = write_report(run, output)
    terminal.show(str(path))
    terminal.name_next("mpdiag", "dashboard", run.parent)


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
    from mpdiag.dashboard import serve

    raise typer.Exit(serve(folder, port, browser=browser))


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=place, help="The folder that holds the runs.")
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, newest first."""
    from mpdiag.reports import listing, terminal
    from mpdiag.runs import list_runs

    found = list_runs(folder)
    if as_json:
        terminal.show_json(listing.runs_json(found))
    elif found:
        terminal.show(listing.runs_table(found))
        recorded = next((item for item in found if item.run and item.run.parts()), None)
        terminal.name_next("mpdiag", "analyze", recorded.folder if recorded else found[0].folder)
    else:
        terminal.show(f"no runs in {folder}")
        terminal.name_next("mpdiag", "demo")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed here, which devices, what is missing."""
    from mpdiag.reports import terminal
    from mpdiag.reports.doctor import environment_text, examine

    environment = examine()
    if as_json:
        terminal.show_json(environment.to_json())
    else:
        terminal.show(environment_text(environment))
        terminal.name_next("mpdiag", "demo")
