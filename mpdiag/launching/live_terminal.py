"""Where a recording in progress shows itself: the last lines of a terminal, or a line now and then.

The script's own output is never taken hold of: it goes to the terminal as it is written, by Python, by
C or by a child process. The terminal is told to scroll all but its last lines (DECSTBM, as ``apt``
does), and these are drawn between two steps, the cursor put back. Where that cannot be (stderr is no
terminal, or a small or a dumb one), a plain line is written every half a minute.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Protocol

from rich.text import Text

from mpdiag.reports.console import Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LINES = 5
"""Of the panel, its rule included."""
LEAST_ROWS, LEAST_COLUMNS = 15, 50
SECONDS_BETWEEN_LINES = 30.0


class Surface(Protocol):
    """Where to show something.

    Attributes:
        seconds: How long to wait at least before the next time.
    """

    seconds: float

    def draw(self, title: str, lines: Sequence[str]) -> None:
        """Show these lines in place of the earlier ones."""

    def close(self, lines: Sequence[str]) -> None:
        """Leave the terminal as it was, with these lines as the last word."""


def open_surface(environment: Mapping[str, str] | None = None) -> Surface:
    """The panel where stderr is a terminal that can hold it, else plain lines."""
    known = os.environ if environment is None else environment
    try:
        fd = sys.stderr.fileno()
        size = os.get_terminal_size(fd) if os.isatty(fd) else None
    except (OSError, ValueError, AttributeError):  # no file at all, as in a notebook
        return PlainLines()
    if size is None or os.name == "nt" or known.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainLines()
    if size.lines < LEAST_ROWS or size.columns < LEAST_COLUMNS:
        return PlainLines()
    return Panel(fd, colour="NO_COLOR" not in known)


class PlainLines:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self.seconds = SECONDS_BETWEEN_LINES

    def draw(self, title: str, lines: Sequence[str]) -> None:
        """Write one line."""
        print(f"mpdiag: {_plain('; '.join((title, *lines)))}", file=sys.stderr, flush=True)

    def close(self, lines: Sequence[str]) -> None:
        """Write the last word."""
        for line in lines:
            print(f"mpdiag: {line}", file=sys.stderr, flush=True)


class Panel:
    """The last lines of a terminal; everything above them scrolls as it always does.

    Args:
        fd: The terminal.
        colour: Whether to colour what is drawn.
    """

    def __init__(self, fd: int, *, colour: bool = True) -> None:
        self.seconds = 0.5
        self._fd = fd
        self._colour = colour
        self._size = (0, 0)
        self._mine = os.getpid()

    def _measure(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:
            return 80, 24
        return size.columns, size.lines

    def _reserve(self, rows: int) -> str:
        """Make room below the cursor, and let all above it scroll alone."""
        room = "\x1bD" * LINES + f"\x1b[{LINES}A"  # a newline would take the cursor to column 1
        return f"{room}\x1b7\x1b[1;{rows - LINES}r\x1b8"

    def draw(self, title: str, lines: Sequence[str]) -> None:
        """Draw the panel; the cursor stays where the script has it."""
        size = self._measure()
        columns, rows = size
        if rows <= LINES + 1 or os.getpid() != self._mine:
            return
        text = ""
        if size != self._size:  # at first, or the window has another size now
            text, self._size = self._reserve(rows), size
        shown = [self._rule(title, columns), *lines][:LINES]
        shown += [""] * (LINES - len(shown))
        text += "\x1b7"
        for i, line in enumerate(shown):
            text += (
                f"\x1b[{rows - LINES + 1 + i};1H\x1b[0m\x1b[2K{self._styled(i, line, columns - 1)}"
            )
        self._write(text + "\x1b8")

    def _rule(self, title: str, columns: int) -> str:
        words = f"── {title} "
        return words + "─" * max(0, columns - 1 - len(words))

    def _styled(self, row: int, line: str, width: int) -> str:
        """A line, cut to the width; names in it cannot move the cursor."""
        text = Text(_plain(line), style="dim" if row == 0 else "bold" if row == 2 else "")
        text.truncate(width, overflow="ellipsis")
        held = io.StringIO()
        console = Terminal(
            file=held,
            force_terminal=True,
            width=width + 1,
            no_color=not self._colour,
            highlight=False,
            legacy_windows=False,
        )
        console.print(text, end="", no_wrap=True, crop=True)
        return held.getvalue()

    def close(self, lines: Sequence[str]) -> None:
        """Give the terminal back, and write the last word above the prompt."""
        if os.getpid() != self._mine:
            return
        text = ""
        if self._size != (0, 0):
            text, self._size = "\x1b7\x1b[r\x1b8\x1b[0m\x1b[J", (0, 0)
        self._write(text)
        PlainLines().close(lines)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the terminal is gone; the training goes on
            return


def _plain(text: str) -> str:
    """Text of one line: names may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text)
