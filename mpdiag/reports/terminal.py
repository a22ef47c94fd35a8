"""Where text goes: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType


PIPE_WIDTH = 120
"""Columns of a table where stdout is no terminal and COLUMNS is not set."""


class _Terminal(Console):
    def on_broken_pipe(self) -> NoReturn:
        # Rich would exit with 1, which means findings. Called while the error is being handled.
        raise  # noqa: PLE0704


def show(*renderables: RenderableType) -> None:
    """Print data to stdout, for a person."""
    console = _Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    for renderable in renderables:
        console.print(renderable)


def show_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document to stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def name_next(command: str) -> None:
    """Name the command to go on with, on stderr."""
    _Terminal(stderr=True).print(Text.assemble(("next: ", "dim"), command), soft_wrap=True)


def remark(message: str) -> None:
    """Print something worth knowing on stderr, in one line."""
    line = " ".join(message.splitlines())
    _Terminal(stderr=True).print(Text.assemble(("note: ", "yellow"), line), soft_wrap=True)


def complain(message: str) -> None:
    """Print an error on stderr, in one line; what it quotes is never taken for markup."""
    line = " ".join(message.splitlines())
    _Terminal(stderr=True).print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
