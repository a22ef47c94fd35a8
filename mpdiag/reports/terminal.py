"""Where text goes: data to stdout, everything else to stderr."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mpdiag.display.wording import shown

PIPE_WIDTH = 120
"""Width of tables where stdout is not a terminal and COLUMNS is not set."""


_PLAIN = str.maketrans("▁▂▃▄▅▆▇█▒━·●─◀▶×→•–…", "__==####.=.o-<>x>*-.")
"""Characters of figures and lists, in ASCII."""


class Terminal(Console):
    """A console that shows names from files as text, whatever characters they hold."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As rich does, with control characters made visible; figures in ASCII without UTF-8."""
        plain = {} if self.encoding.lower().startswith("utf") else _PLAIN
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(shown(segment.text).translate(plain), segment.style)

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
    _tell("next: ", "dim", shlex.join(map(str, words)))


def remark(message: str) -> None:
    """Print something worth knowing on stderr, in one line."""
    _tell("note: ", "yellow", " ".join(message.splitlines()))


def complain(message: str) -> None:
    """Print an error on stderr, in one line; what it quotes is never taken for markup."""
    _tell("error: ", "bold red", " ".join(message.splitlines()))


def _tell(label: str, style: str, line: str) -> None:
    """Print a line on stderr, which is not there in a program without a console, or may be full."""
    if sys.stderr is not None:
        with suppress(OSError):
            Terminal(stderr=True).print(Text.assemble((label, style), line), soft_wrap=True)
