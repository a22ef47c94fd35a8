"""Whose run a folder holds: with ``overwrite`` another process may have put its own in its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpdiag.files.paths import is_remote
from mpdiag.runs.run import META

if TYPE_CHECKING:
    from mpdiag.files.paths import AnyPath

_HEAD = 4096
_CREATED = re.compile(rb'"created": "([^"]*)"')


def is_replaced(folder: AnyPath, rank: int, created: str) -> bool:
    """Whether a rank's meta file tells of another recording than the one created at this moment.

    Only its first lines are read. A folder that is gone was not replaced: writing will say so. At a
    URL nobody looks, as each look is a transfer.
    """
    meta = folder / META if rank == 0 else folder / "ranks" / f"rank{rank:05d}.json"
    if is_remote(meta):
        return False
    try:
        with meta.open("rb") as file:
            found = _CREATED.search(file.read(_HEAD))
    except OSError:
        return False
    return found is not None and found[1] != created.encode()
