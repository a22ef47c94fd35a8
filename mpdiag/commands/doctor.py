"""``mpdiag doctor``: what is installed, and what is missing."""

from typing import Annotated

from typer import Option

from mpdiag.commands.shared.options import JsonOption


def doctor(
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show every package and setting, with reasons.")
    ] = False,
) -> None:
    """List installed and missing packages, and the devices."""
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.machine import environment_text, examine

    environment = examine()
    if as_json:
        terminal.show_json(environment.to_json())
    else:
        terminal.show(environment_text(environment, verbose=verbose))
        terminal.name_next(*next_commands.after_examination())
