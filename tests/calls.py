"""Calls of the command, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from mpdiag import cli

COMMANDS = {name: cli.command(name) for name in cli.COMMANDS}


def run(*words, **environment):
    """Call ``mpdiag`` with these words."""
    return CliRunner().invoke(cli.app, [str(word) for word in words], env=environment or None)
