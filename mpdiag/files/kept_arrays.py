"""Arrays that were computed from files, kept in the user's cache until one of the files changes.

They lie in the cache and not beside what they were made from, which may be read-only, copied or
shared. The folder is ``MPDIAG_CACHE``, else what the system says a user's cache is; where it cannot be
written, or ``MPDIAG_CACHE`` is empty, nothing is kept and all is computed anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.files.atomic import atomic_path
from mpdiag.files.stamps import Stamp, stamp_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

CACHE = "MPDIAG_CACHE"
"""Name of the environment variable with the folder."""
MOST = 32
"""So many sets of arrays are kept; of more, those go that were used longest ago."""


def cache_folder() -> Path | None:
    """Where arrays are kept; None if they are not to be kept."""
    named = os.environ.get(CACHE)
    if named is not None:
        return Path(named) if named else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        if sys.platform == "darwin":
            base = str(Path("~/Library/Caches").expanduser())
    return Path(base) / "mpdiag" if base and Path(base).is_absolute() else None


class KeptArrays:
    """What was computed from some files, by name; see the module.

    Args:
        files: The files.
        words: What else the arrays depend on.
        code: Folders of this package's code that computes them: with other code they are others.
    """

    def __init__(self, files: Sequence[Path], words: Iterable[object], code: Sequence[str]) -> None:
        self._files = [file.absolute() for file in files]
        self._stamp: Stamp = ()
        self._folder: Path | None = None
        with suppress(OSError, RuntimeError):  # without a home there is no cache
            own = Path(__file__).resolve().parent.parent
            made_by = stamp_of(sorted(f for name in code for f in (own / name).rglob("*.py")))
            self._stamp = stamp_of(self._files)
            if len(self._stamp) < len(
                self._files
            ):  # nothing can be computed from what is not there
                return
            key = repr((np.__version__, made_by, self._stamp, tuple(words)))
            folder = cache_folder()
            if folder is not None:
                digest = hashlib.sha256(key.encode()).hexdigest()[:32]
                self._folder = folder / "statistics" / digest

    def get(self, name: str) -> dict[str, NDArray[np.generic]] | None:
        """The arrays kept under a name; None if there are none, or they cannot be read."""
        if self._folder is None:
            return None
        path = self._folder / f"{name}.npz"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
                found = {key: held[key] for key in held.files}
            os.utime(self._folder)
        except Exception:  # noqa: BLE001 - a damaged file raises whatever zip and NumPy do
            return None
        return found

    def put(self, name: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Keep arrays under a name, unless a file has changed since this object was made."""
        if self._folder is None:
            return
        with suppress(OSError):
            if stamp_of(self._files) != self._stamp:
                return
            if not self._folder.exists():
                self._folder.mkdir(parents=True)
                _forget_oldest(self._folder.parent)
            with atomic_path(self._folder / f"{name}.npz") as partial, partial.open("wb") as file:
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def _forget_oldest(folder: Path) -> None:
    """Remove all but the sets of arrays that were used last."""
    sets = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)
    for old in sets[:-MOST]:
        shutil.rmtree(old, ignore_errors=True)
