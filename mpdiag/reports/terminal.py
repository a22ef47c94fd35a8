"""Where text goes: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import ConsoleOptions, RenderableType


PIPE_WIDTH = 120
"""Width of tables where stdout is not a terminal and COLUMNS is not set."""


# What a terminal would obey instead of showing: C0, DEL, C1, marks that turn the direction
# of text, and halves of characters that cannot be encoded.
_SHOWN: dict[int, str] = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_SHOWN |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_SHOWN |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), "\ufffd")
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


class Terminal(Console):
    """A console that shows names from files as text, whatever characters they hold."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As rich does, with control characters made visible."""
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(segment.text.translate(_SHOWN), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Let the error pass: rich would exit with 1, which means findings."""
        raise  # noqa: PLE0704


def show(*renderables: RenderableType) -> None:
    """Print data to stdout for a person; characters that its encoding lacks become question marks."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    for renderable in renderables:
        console.print(renderable)


def height() -> int | None:
    """Lines of the terminal that stdout is; None where it is a file or a pipe."""
    console = Terminal()
    return console.size.height if console.is_terminal else None


def show_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document to stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on stderr what is running, as long as it runs; nothing where stderr is not a terminal."""
    with Terminal(stderr=True).status(Text(what)):
        yield


def name_next(*words: object) -> None:
    """Name the command to run next, on stderr, ready to be copied into a shell; no words, no line.

    The words come from ``next_commands``, which names what can succeed.
    """
    if not words:
        return
    command = shlex.join(map(str, words))
    Terminal(stderr=True).print(Text.assemble(("next: ", "dim"), command), soft_wrap=True)


def remark(message: str) -> None:
    """Print something worth knowing on stderr, in one line."""
    line = " ".join(message.splitlines())
    Terminal(stderr=True).print(Text.assemble(("note: ", "yellow"), line), soft_wrap=True)


def complain(message: str) -> None:
    """Print an error on stderr, in one line; what it quotes is never taken for markup."""
    line = " ".join(message.splitlines())
    Terminal(stderr=True).print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
