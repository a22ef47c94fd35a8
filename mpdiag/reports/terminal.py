"""Where text goes: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import shown

if TYPE_CHECKING:
    from rich.console import RenderableType


PIPE_WIDTH = 120
"""Width of tables where stdout is not a terminal and COLUMNS is not set."""


def show(*renderables: RenderableType) -> None:
    """Print data to stdout for a person; characters that its encoding lacks become question marks."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    from mpdiag.reports.console import Terminal

    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    for renderable in renderables:
        console.print(renderable)


def height() -> int | None:
    """Lines of the terminal that stdout is; None where it is a file or a pipe."""
    from mpdiag.reports.console import Terminal

    console = Terminal()
    return console.size.height if console.is_terminal else None


def show_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document to stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on stderr what is running, as long as it runs; nothing where stderr is not a terminal."""
    from rich.text import Text

    from mpdiag.reports.console import Terminal

    with Terminal(stderr=True).status(Text(what)):
        yield


def name_next(*words: object) -> None:
    """Name the command to run next, on stderr, ready to be copied into a shell; no words, no line.

    The words come from ``next_commands``, which names what can succeed.
    """
    if not words:
        return
    _tell("next: ", "dim", shlex.join(map(str, words)))


def remark(message: str) -> None:
    """Print something worth knowing on stderr, in one line."""
    _tell("note: ", "yellow", " ".join(message.splitlines()))


def complain(message: str) -> None:
    """Print an error on stderr, in one line; what it quotes is never taken for markup."""
    _tell("error: ", "bold red", " ".join(message.splitlines()))


_COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that make rich write colours where there is no terminal."""


def _tell(label: str, style: str, line: str) -> None:
    """Print a line on stderr; in colours, which rich makes, where they can be seen."""
    if sys.stderr is None:
        return
    if not sys.stderr.isatty() and not any(os.environ.get(name) for name in _COLOURS):
        sys.stderr.write(shown(f"{label}{line}".expandtabs(8)) + "\n")
        sys.stderr.flush()
        return
    from rich.text import Text

    from mpdiag.reports.console import Terminal

    Terminal(stderr=True).print(Text.assemble((label, style), line), soft_wrap=True)
