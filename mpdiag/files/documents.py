"""JSON documents: regular files of bounded size, read whole. Others may have written them.

``converted`` turns what was read into dataclasses, by msgspec. It serves the documents of a search,
of measured sensitivities and of training logs. ``plan.json`` and ``meta.json`` are checked without it
(``plan.py``, ``runs/meta_validation.py``): a machine that records, analyzes and trains may have no
package beyond torch's and the core's.
"""

import json
import math
import os
import stat
from typing import Any, TypeVar

from mpdiag.errors import UsageError
from mpdiag.files.paths import AnyPath, is_remote

T = TypeVar("T")

LARGEST = 1 << 28
"""Bytes. What mpdiag writes takes some 200 bytes a layer. A sparse file of 1 TB costs its sender
nothing, and would cost its reader all memory."""


def read_document(path: AnyPath, **options: Any) -> Any:
    """The value of a JSON file; halves of characters, which no text can hold, are replaced.

    Args:
        path: The file.
        **options: As for ``json.loads``.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file, no JSON, no UTF-8 or too large.
        RecursionError: If it is nested too deep.
    """
    with path.open("rb") if is_remote(path) else open(path, "rb", opener=_regular) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(_too_large(f"more than {LARGEST:,}"))
    return whole_characters(json.loads(content.decode("utf-8"), **options), content)


def whole_characters(value: Any, source: bytes) -> Any:
    """A value read from JSON without lone surrogates, at any depth; the source says if there may be any.

    A recorder writes them itself, where an argument or a path of the training was no UTF-8.
    """
    return _mended(value) if b"\\ud" in source or b"\\uD" in source else value


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(k): _mended(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_mended(v) for v in value]
    return value


def _regular(path: str, flags: int) -> int:
    """Open a regular file of bounded size; a pipe is not waited for, and a device is not read."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(path)
    if stat.S_ISREG(status.st_mode):
        raise ValueError(_too_large(f"{status.st_size:,}"))
    raise ValueError("it is not a file")


def _too_large(size: str) -> str:
    return f"{size} bytes are more than such a file can have"


def converted(value: Any, kind: type[T]) -> T:
    """A JSON value as the dataclass (or any annotated type) it is to be.

    Unknown fields are ignored, nothing is coerced but an integer to a float.

    Raises:
        ValueError: Naming the first field that does not fit, and why.
        UsageError: If msgspec is not installed.
    """
    try:
        import msgspec
    except ModuleNotFoundError as error:
        message = "reading this file needs msgspec, which is not installed: pip install msgspec"
        raise UsageError(message) from error
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).replace("`", "").partition(" - at $")
        field = where.lstrip(".")
        raise ValueError(f"{field}: {reason}" if field else reason) from None


def finite(value: Any) -> Any:
    """A value for JSON, which has no infinity and no NaN: None replaces them, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
