"""What tells that a file has changed: its name, its time and its size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """What changes when one of some files does, appears or goes.

    Returns:
        For each file that is there its path as given, its time of change (nanoseconds) and its size
        (bytes).
    """
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:  # not there, or gone since it was listed
            continue
        found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(found)
