"""Tokens, keys and passwords, which no file and no message may show."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
"""What stands in a document for a token, a key or a password."""
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_login(text: str) -> str:
    """A text without the user names and passwords of the URLs in it."""
    return _LOGIN.sub(HIDDEN, text)
