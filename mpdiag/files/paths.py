"""Where runs lie: a local path, or a URL of any file system that fsspec knows.

``place`` is the seam: a local path (``file://`` included) stays a ``pathlib.Path`` and keeps its
atomic rename; any other URL becomes a ``RemotePath``, which does what runs do with a path. A remote
file is written whole, from a local one, in a single transfer; object stores show it then, or not
at all. Settings of a file system (an endpoint, credentials) are fsspec's own: its environment
variables and configuration files.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

from mpdiag.errors import UsageError
from mpdiag.installation.extras import EXTRAS

if TYPE_CHECKING:
    from collections.abc import Iterator

# Two letters at least: a single one is a drive. `Path` makes one slash of two, so one will do.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,3})(.*)", re.DOTALL)
_LOCAL = ("file", "local")


def place(where: str | os.PathLike[str]) -> Path:
    """A local path, or a ``RemotePath`` for a URL; typed as the former, whose methods it has.

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
    return cast("Path", RemotePath(f"{protocol}://{rest}"))


def is_remote(path: object) -> bool:
    """Whether ``place`` made a ``RemotePath`` of it."""
    return isinstance(path, RemotePath)


def _known(protocol: str) -> bool:
    from fsspec import available_protocols

    return protocol in available_protocols()


@contextmanager
def _as_oserror(url: str) -> Iterator[None]:
    """Clients of object stores have errors of their own; callers expect what a file would raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # whatever it is, it is no reason to stop a training
        message = f"{type(error).__name__}: {error}"
        raise OSError(None, message, url) from error


class RemotePath:
    """A URL with the methods of ``pathlib.Path`` that runs use."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self._system, self._path = url_to_fs(url)
        except ImportError as error:
            extra = EXTRAS.get(url.partition(":")[0])
            how = "pip install it" if extra is None else extra.install
            message = f"{url} needs a package that is not installed ({error}): {how}"
            raise UsageError(message) from error
        except ValueError as error:
            message = f"{url} is on no file system that fsspec knows ({error})"
            raise UsageError(message) from error
        self._url = str(self._system.unstrip_protocol(self._path)).rstrip("/")

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's ending, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder it lies in."""
        return self._beside(self._system._parent(self._path))

    def absolute(self) -> RemotePath:
        """Itself: a URL is absolute."""
        return self

    resolve = absolute

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        with _as_oserror(self._url):
            return bool(self._system.exists(self._path))

    def is_file(self) -> bool:
        """Whether there is a file."""
        with _as_oserror(self._url):
            return bool(self._system.isfile(self._path))

    def is_dir(self) -> bool:
        """Whether there is a folder, or in an object store anything below it."""
        with _as_oserror(self._url):
            self._system.invalidate_cache()  # another process may have written since
            return bool(self._system.isdir(self._path))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:  # noqa: ARG002
        """Make the folder, where the file system has any, with those above it."""
        with _as_oserror(self._url):
            self._system.makedirs(self._path, exist_ok=exist_ok)

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly in it."""
        with _as_oserror(self._url):
            found = self._system.ls(self._path, detail=False)
        return (self._beside(path) for path in found)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What matches, at the depth the pattern has."""
        with _as_oserror(self._url):
            found = self._system.glob(f"{self._path}/{pattern}")
        return (self._beside(path) for path in found)

    def _beside(self, path: str) -> RemotePath:
        return RemotePath(str(self._system.unstrip_protocol(path)))

    def read_text(self, encoding: str = "utf-8") -> str:
        """The file as text."""
        with _as_oserror(self._url):
            return bytes(self._system.cat_file(self._path)).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Write the file whole."""
        with _as_oserror(self._url):
            self._system.pipe_file(self._path, text.encode(encoding))
        return len(text)

    def receive(self, local: Path) -> None:
        """Replace the file by a local one, in one transfer."""
        with _as_oserror(self._url):
            self._system.put_file(str(local), self._path)

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:
        """Open for reading, or (``a``) for lines that are added."""
        if mode.startswith("a"):
            return _Appending(self)
        with _as_oserror(self._url):
            return cast("IO[Any]", self._system.open(self._path, mode, **options))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        if missing_ok and not self.exists():
            return
        with _as_oserror(self._url):
            self._system.rm_file(self._path)

    def remove_tree(self) -> None:
        """Remove the folder and all in it."""
        with _as_oserror(self._url):
            self._system.rm(self._path, recursive=True)


class _Appending(io.StringIO):
    """Lines added to a remote file, which is written whole when they have doubled, and at the end.

    So the transfers of n lines add up to some 2n lines, where each flush sending all would be n²/2.
    """

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._target = path
        self._sent = 0
        if path.is_file():
            self.write(path.read_text())

    def flush(self) -> None:
        if self.tell() >= 2 * self._sent:
            self._send()

    def _send(self) -> None:
        self._target.write_text(self.getvalue())
        self._sent = self.tell()

    def close(self) -> None:
        if not self.closed and self.tell() != self._sent:
            self._send()
        super().close()
