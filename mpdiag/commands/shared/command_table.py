"""The commands, each imported when it is asked for: one that runs need not read the others."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import typer

from mpdiag.commands.shared.examples import epilog
from mpdiag.commands.shared.failures import RUNS_A_SCRIPT
from mpdiag.commands.shared.plain_values import PlainCommand
from mpdiag.commands.shared.scripts import SCRIPT_SETTINGS

COMMANDS = (
    "demo", "search", "record", "train", "profile", "analyze", "why", "explain", "replay", "compare",
    "report", "dashboard", "runs", "doctor", "export", "board",
)  # fmt: skip
"""In the order of the help. Each is the function of that name in a module of that name; a module whose
command needs a class of its own has it as ``COMMAND_CLASS``."""


class CommandTable(MutableMapping[str, Any]):
    """The commands by name; each is made when it is first looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = dict.fromkeys(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        if self._made[name] is None:
            self._made[name] = made(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def made(name: str) -> Any:
    """The typer command of a name in ``COMMANDS``."""
    module = import_module(f"mpdiag.commands.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = SCRIPT_SETTINGS if name in RUNS_A_SCRIPT else None
    own = getattr(module, "COMMAND_CLASS", PlainCommand)
    alone.command(cls=own, context_settings=settings, epilog=epilog(name))(getattr(module, name))
    return typer.main.get_command(alone)
