"""Calls of the command, in this process, and what a report prints."""

import io

from rich.console import Console
from typer.testing import CliRunner

from mpdiag import cli

COMMANDS = {name: cli.command(name) for name in cli.COMMANDS}


def run(*words, **environment):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env=environment or None)


def printed(*renderables, width=80):
    """What a report prints in so many columns, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(*renderables, sep="\n")
    return console.file.getvalue()
