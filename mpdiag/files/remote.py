"""Files at a URL, with the methods of ``pathlib.Path``: universal-pathlib, and what runs add to it.

A remote file is written whole, from a local one, in a single transfer; object stores show it then,
or not at all. Whatever a file system's client raises comes as an ``OSError``. Settings of a file
system (an endpoint, credentials) are fsspec's own: its environment variables and configuration
files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from upath.extensions import ProxyUPath

from mpdiag.errors import UsageError
from mpdiag.files.secrets import without_secrets
from mpdiag.installation.extras import EXTRAS

if TYPE_CHECKING:
    from typing_extensions import Self


@contextmanager
def _as_oserror(path: RemotePath) -> Iterator[None]:
    """Clients of object stores have errors of their own; callers expect what a file would raise."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise _naming(error, str(path)) from error
    except Exception as error:  # whatever it is, it is no reason to stop a training
        message = f"{type(error).__name__}: {error}"
        raise OSError(None, message, str(path)) from error


def _naming(error: OSError, place: str) -> OSError:
    """The error of a network, which knows no file, as one that names it, and of Python's own class."""
    kind = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
    named: OSError = kind(error.errno, error.strerror or str(error), place)
    return named


def _guarded(name: str) -> Any:
    """A method of ``pathlib.Path`` that raises as it does there; what it iterates over, it lists."""
    method = getattr(ProxyUPath, name)

    @wraps(method)
    def call(path: RemotePath, *arguments: Any, **options: Any) -> Any:
        with _as_oserror(path):
            result = method(path, *arguments, **options)
            return iter(list(result)) if isinstance(result, Iterator) else result

    return call


class RemotePath(ProxyUPath):
    """A file or a folder at a URL.

    Raises:
        UsageError: If no such file system is known, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            super().__init__(url)
            _ = self.fs  # made now, so that what is missing is said now
        except ImportError as error:
            extra = EXTRAS.get(url.partition(":")[0])
            how = "pip install it" if extra is None else extra.install
            raise UsageError(
                f"{without_secrets(url)} needs a package that is not installed ({error}): {how}"
            ) from error
        except ValueError as error:
            message = f"{without_secrets(url)} is on no file system that fsspec knows ({error})"
            raise UsageError(message) from error
        except OSError as error:  # some connect at once
            raise _naming(error, without_secrets(url)) from error

    def __str__(self) -> str:
        """The URL as the file system writes it, without a user's name and password."""
        return str(self.fs.unstrip_protocol(self.path)).rstrip("/")

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002 - as pathlib has it
        """Itself: a URL is absolute."""
        return self

    exists, is_file, iterdir, glob = map(_guarded, ("exists", "is_file", "iterdir", "glob"))
    read_text, write_text, unlink = map(_guarded, ("read_text", "write_text", "unlink"))

    def is_dir(self) -> bool:
        """Whether there is a folder, or in an object store anything below it."""
        with _as_oserror(self):
            self.fs.invalidate_cache()  # another process may have written since
            return bool(super().is_dir())

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:  # noqa: ARG002
        """Make the folder, where the file system has any, with those above it."""
        with _as_oserror(self):
            self.fs.makedirs(self.path, exist_ok=exist_ok)

    def receive(self, local: Path) -> None:
        """Replace the file by a local one, in one transfer."""
        with _as_oserror(self):
            self.fs.put_file(str(local), self.path)

    def fetch(self, local: Path) -> None:
        """Copy the file to a local one, in one transfer."""
        with _as_oserror(self):
            self.fs.get_file(self.path, str(local))

    def open(self, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        """Open for reading, or (``a``) for lines that are added."""
        if mode.startswith("a"):
            return _Appending(self)
        with _as_oserror(self):
            return super().open(mode, *args, **options)


class _Appending(io.StringIO):
    """Lines added to a remote file, which is written whole when they have doubled, and at the end.

    So the transfers of n lines add up to some 2n lines, where each flush sending all would be n²/2.
    """

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._target = path
        self._sent = 0
        if path.is_file():
            self.write(path.read_text(encoding="utf-8"))

    def flush(self) -> None:
        if self.tell() >= 2 * self._sent:
            self._send()

    def _send(self) -> None:
        self._target.write_text(self.getvalue(), encoding="utf-8")
        self._sent = self.tell()

    def close(self) -> None:
        if not self.closed and self.tell() != self._sent:
            self._send()
        super().close()
