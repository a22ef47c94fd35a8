"""``mpdiag dashboard``: runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUNS", help="A folder of runs; default: the sample runs."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="The port it listens on.")
    ] = 8501,
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
) -> None:
    """Look at runs in a browser."""
    from mpdiag.commands.shared.dashboard_server import serve

    raise typer.Exit(serve(folder, port, browser=browser))
