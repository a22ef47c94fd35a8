"""Local copies of remote files that are read more than once."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from mpdiag.files.paths import is_remote

if TYPE_CHECKING:
    from mpdiag.files.paths import AnyPath


class Copies:
    """Copies on the disk, each fetched whole when it is first asked for.

    The analysis reads a part of a run up to five times: its number of rows, and what each pass needs.
    At a URL each of them would be a transfer. They lie in the folder for temporary files, as they can
    be larger than memory, and go when this object does.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._folder: Path | None = None
        self._known: dict[str, Path] = {}

    def local(self, path: AnyPath) -> Path:
        """Where a file can be read: itself if it is local.

        Raises:
            OSError: If it cannot be fetched.
        """
        if not is_remote(path):
            return path
        with self._lock:
            known = self._known.get(str(path))
            if known is not None:
                return known
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="mpdiag-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            copy = self._folder / f"{len(self._known)}-{path.name}"
            path.fetch(copy)
            self._known[str(path)] = copy
            return copy
