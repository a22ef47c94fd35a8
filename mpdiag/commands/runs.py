"""``mpdiag runs``: the runs in a folder."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mpdiag.commands.shared.options import JsonOption
from mpdiag.errors import RunNotFound
from mpdiag.files.paths import place
from mpdiag.files.recognition import run_instead


def runs(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", parser=place, help="The folder that holds the runs.")
    ] = Path("runs"),
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="List all runs, even if the terminal is too small.")
    ] = False,
) -> None:
    """List the runs in a folder, newest first."""
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.lists import runs_json, runs_table
    from mpdiag.runs.run import META, list_runs

    found = list_runs(folder)
    if not found and (folder / META).is_file():
        raise RunNotFound(run_instead(folder, "folder of runs"))
    if as_json:
        terminal.show_json(runs_json(found))
    elif found:
        lines = None if verbose else terminal.height()
        terminal.show(runs_table(found, lines))
        terminal.name_next(*next_commands.after_listing(found))
    else:
        terminal.show(f"no runs in {folder}")
        terminal.name_next(*next_commands.try_it())
