"""Files that appear whole or not at all: written beside their place, and then renamed.

Written by hand for what libraries of atomic writes leave out: a file that must not exist yet (the
first of several processes wins, by a hard link), and a target at a URL, which is sent whole.
"""

import errno
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpdiag.errors import RunExists, UsageError
from mpdiag.files.paths import AnyPath, is_remote


@contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Wrap the writing of a file that a person named.

    Raises:
        UsageError: In place of an ``OSError``, with a sentence that says what to do.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot write {path} ({error.strerror}): choose another file with -o"
        raise UsageError(message) from error


def write_json(path: AnyPath, document: Mapping[str, Any]) -> None:
    """Write a JSON document whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(json_text(document), encoding="utf-8")


def json_text(document: Mapping[str, Any]) -> str:
    """A document as every file of a run holds it; it may hold no infinity and no NaN."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


class atomic_path:  # noqa: N801 - reads as a verb at its call sites
    """Context manager: a path beside the target that replaces it on success, and goes on failure.

    For a remote target the path is a local file, which is sent whole.

    Args:
        target: The file to write.
        replace: Whether it may exist; if not, and it does by then, ``RunExists`` is raised. Of
            several processes that try at once, one succeeds.
    """

    def __init__(self, target: AnyPath, *, replace: bool = True) -> None:
        self.target = target
        self._replace = replace
        beside = Path(tempfile.gettempdir()) / uuid.uuid4().hex if is_remote(target) else target
        if not beside.name:  # as of "", which an unset variable of a shell leaves
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        self.partial: Path = beside.with_name(f".{beside.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        """The path to write to."""
        return self.partial

    def __exit__(self, kind: object, *_: object) -> None:
        """Rename on success, remove on failure."""
        try:
            if kind is None and is_remote(self.target):
                self.target.receive(self.partial)
            elif kind is None and self._replace:
                os.replace(self.partial, self.target)
            elif kind is None:
                self._rename_to_free_place()
        finally:
            self.partial.unlink(missing_ok=True)

    def _rename_to_free_place(self) -> None:
        try:
            os.link(self.partial, self.target)
        except FileExistsError:
            message = f"another process began a run at {self.target.parent}: choose another folder"
            raise RunExists(message) from None
        except OSError:  # a file system without links
            os.replace(self.partial, self.target)
