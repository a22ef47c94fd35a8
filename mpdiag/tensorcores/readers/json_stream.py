"""JSON read piece by piece: a document of any size in the memory of one window.

Values are decoded by the standard library's scanner, at its full speed, out of a window over the
text. What is damaged is counted and skipped, so that a trace that was cut off, or holds a string
that was never closed, still yields its other events.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TextIO

WINDOW = 1 << 18
"""Characters read at a time."""
LOW = 1 << 15
"""When fewer are left, more are read before a value is decoded."""
LONGEST = 1 << 24
"""Characters of a single value; what is longer is damaged."""

_BLANKS = frozenset(", \t\r\n") | {""}
_BLANK = re.compile(r"[\s,]*")
_decode = json.JSONDecoder(strict=False).raw_decode


class Damaged(ValueError):
    """A value is not JSON, or ends with the text."""


class JsonStream:
    """A window over a text of JSON.

    Attributes:
        text, at: The window, and the place in it.
        ended: Whether the text was read to its end.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> bool:
        """Read on; False at the end."""
        if self.ended:
            return False
        try:
            piece = self._file.read(WINDOW)
        except (OSError, EOFError):  # a gzip file that was cut off
            piece = ""
        except Exception as error:  # zlib.error, which is no OSError
            if type(error).__name__ != "error":
                raise
            piece = ""
        self.ended = not piece
        self.text = self.text[self.at :] + piece
        self.at = 0
        return not self.ended

    def peek(self) -> str:
        """The next character that is neither blank nor a comma; "" at the end."""
        while True:
            at = self.at
            found = self.text[at : at + 1]
            if found in _BLANKS:  # so is nothing
                match = _BLANK.match(self.text, at)
                at = self.at = match.end() if match else at
                found = self.text[at : at + 1]
            if found or not self.more():
                return found

    def value(self) -> Any:
        """Decode the next value.

        Raises:
            Damaged: If it is none; ``at`` is then still at its beginning.
        """
        if len(self.text) - self.at < LOW:
            self.more()
        while True:
            try:
                value, end = _decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self.text) - 64 or error.msg.startswith("Unterminated")
                if cut and len(self.text) - self.at < LONGEST and self._double():
                    continue
                raise Damaged from error
            except (ValueError, RecursionError) as error:  # too many digits, too deep
                raise Damaged from error
            if end == len(self.text) and self.more():  # a number may go on
                continue
            self.at = end
            return value

    def _double(self) -> bool:
        """Read until the window has twice its text, so that retries stay cheap."""
        aim = 2 * (len(self.text) - self.at)
        grown = self.more()
        while len(self.text) < aim and self.more():
            pass
        return grown

    def find(self, pattern: re.Pattern[str]) -> bool:
        """Move on to the next match, beyond the present place."""
        self.at = min(self.at + 1, len(self.text))
        while True:
            match = pattern.search(self.text, self.at)
            if match:
                self.at = match.start()
                return True
            self.at = max(self.at, len(self.text) - 64)
            if not self.more():
                self.at = len(self.text)
                return False
