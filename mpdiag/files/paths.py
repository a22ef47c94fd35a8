"""Where files lie: at a local path, or at a URL of any file system that fsspec knows.

``place`` decides. A local path (``file://`` included) is a ``pathlib.Path`` and keeps its atomic
rename; any other URL is a ``RemotePath``, which is built on universal-pathlib. That package is
imported for the first URL and not before, so that a machine without it records into local folders.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from mpdiag.files.remote import RemotePath

    AnyPath: TypeAlias = Path | RemotePath
else:
    AnyPath = Path  # for annotations that are read when the program runs, as the commands' are

# Two letters at least: a single one is a drive. `Path` makes one slash of two, so one will do.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,3})(.*)", re.DOTALL)
_LOCAL = ("file", "local")


def place(where: str | os.PathLike[str]) -> AnyPath:
    """The path that a name or a URL stands for.

    Raises:
        UsageError: If no such file system is known, or its package is not installed.
    """
    text = os.fspath(where)
    found = _URL.fullmatch(text)
    if found is None:
        return Path(text)
    protocol, slashes, rest = found.groups()
    if protocol in _LOCAL:
        return Path("/" + rest)
    if len(slashes) == 1 and (Path(text).exists() or not _known(protocol)):
        return Path(text)  # a folder whose name ends in a colon
    return _remote(f"{protocol}://{rest}")


def is_remote(path: object) -> TypeIs[RemotePath]:
    """Whether ``place`` made a ``RemotePath`` of it."""
    return not isinstance(path, (str, Path))


def _known(protocol: str) -> bool:
    from fsspec import available_protocols

    return protocol in available_protocols()


def _remote(url: str) -> RemotePath:
    try:
        from mpdiag.files.remote import RemotePath
    except ModuleNotFoundError as error:
        raise UsageError(
            "a run at a URL needs universal-pathlib, which is not installed: "
            "pip install universal-pathlib, or name a local folder"
        ) from error
    return RemotePath(url)


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


def shown_name(path: AnyPath) -> str:
    """A name for tables and figures, which hold no text that is not UTF-8: such bytes are replaced."""
    return os.fsencode(path.name).decode("utf-8", "replace")
