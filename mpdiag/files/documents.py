"""JSON documents: read whole, but not whatever their size, for others may have written them."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from mpdiag.files.paths import is_remote

if TYPE_CHECKING:
    from mpdiag.files.paths import AnyPath

LARGEST = 1 << 28
"""Bytes. What is written here takes some 200 bytes a layer; a sparse file of 1 TB costs its sender
nothing, and whoever reads it whole all memory."""
HIDDEN = "(hidden)"
"""What stands in a document for a token, a key or a password."""
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_login(text: str) -> str:
    """A text without the user names and passwords of the URLs in it."""
    return _LOGIN.sub(HIDDEN, text)


def read_document(path: AnyPath, **options: Any) -> Any:
    """The value of a JSON file.

    Args:
        path: The file.
        **options: As for ``json.loads``.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no JSON, no UTF-8 or too large.
        RecursionError: If it is nested too deep.
    """
    size = 0 if is_remote(path) else path.stat().st_size  # of a URL that would be a request more
    if size > LARGEST:
        message = f"{size:,} bytes are more than it can have"
        raise ValueError(message)
    return json.loads(path.read_text(encoding="utf-8"), **options)


def finite(value: Any) -> Any:
    """A value for JSON, which knows no infinity and no NaN: None in their place, in nests, too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
