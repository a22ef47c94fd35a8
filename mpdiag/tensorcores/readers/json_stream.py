"""A streaming JSON reader: a document of any size in the memory of one window.

Values are decoded at full speed by the standard library's scanner from a window over the text.
Damaged values are counted and skipped, so that a trace that was cut off, or that holds an unclosed
string, still yields its other events. Streaming libraries such as ijson stop at the first error.
"""

import json
import math
import re
from typing import Any, TextIO

from mpdiag.tensorcores.readers.tables import uncut

WINDOW = 1 << 18
"""Characters read at a time."""
LOW = 1 << 15
"""If fewer characters are left, more are read before a value is decoded."""
LONGEST = 1 << 24
"""The longest value, in characters; anything longer counts as damaged."""

_BLANKS = frozenset(", \t\r\n") | {""}
_BLANK = re.compile(r"[\s,]*")
_decode = json.JSONDecoder(strict=False).raw_decode


class Damaged(ValueError):
    """A value is not JSON, or is cut off by the end of the text."""


class JsonStream:
    """A window over a text of JSON.

    Attributes:
        text, at: The window and the position in it.
        ended: Whether the file was read to its end.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> bool:
        """Read more text; False at the end of the file."""
        if self.ended:
            return False
        piece = uncut(self._file.read, WINDOW)
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
            Damaged: If there is none; ``at`` is then still at its beginning.
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
        """Read until the window holds twice as much text, so that retries stay cheap."""
        aim = 2 * (len(self.text) - self.at)
        grown = self.more()
        while len(self.text) < aim and self.more():
            pass
        return grown

    def find(self, pattern: re.Pattern[str], limit: float = math.inf) -> bool:
        """Move to the next match after the current position.

        Args:
            pattern: What to find.
            limit: After about so many characters without it, the rest is given up.
        """
        self.at = min(self.at + 1, len(self.text))
        while True:
            match = pattern.search(self.text, self.at)
            if match:
                self.at = match.start()
                return True
            limit -= len(self.text) - self.at
            self.at = max(self.at, len(self.text) - 64)
            if limit < 0 or not self.more():
                self.at = len(self.text)
                return False
