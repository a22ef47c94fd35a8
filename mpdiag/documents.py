"""JSON documents out of files that others may have written: read whole, but not whatever their size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LARGEST = 1 << 28
"""Bytes. What is written here takes some 200 bytes a layer; a sparse file of 1 TB costs its sender
nothing, and whoever reads it whole all memory."""
HIDDEN = "(hidden)"
"""What stands in a document for a token, a key or a password."""


def read_document(path: Path, **options: Any) -> Any:
    """The value of a JSON file.

    Args:
        path: The file.
        **options: As for ``json.loads``.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no JSON, no UTF-8 or too large.
        RecursionError: If it is nested too deep.
    """
    size = path.stat().st_size if hasattr(path, "stat") else 0  # a URL has none
    if size > LARGEST:
        message = f"{size:,} bytes are more than it can have"
        raise ValueError(message)
    return json.loads(path.read_text(encoding="utf-8"), **options)
