"""Where an operation was called from: the user's line, and the module."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with co_filename
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_OURS = tuple(_PACKAGE + room + os.sep for room in ("recording", "training", "analysis"))
_GLUE = ("contextlib.py", "functools.py")
_FUNCTIONAL = os.path.join(_TORCH, "nn", "functional.py")  # noqa: PTH118


@dataclass(frozen=True)
class Site:
    """A place in the user's code.

    Attributes:
        module: Name of the module being called, None outside the models.
        file, line, code: The line, and its text; empty where no Python of the user's is on the way.
        function: Outermost function of ``torch.nn.functional`` in between, if any.
        index: Of the operation that was called there first.
    """

    module: str | None
    file: str
    line: int
    code: str
    function: str
    index: int = -1


def locate() -> tuple[str, int, str, str]:
    """File, line, text and functional of the user's frame nearest to here.

    Frames of torch and of this package are passed over.
    """
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind == "user":
            file, line = frame.f_code.co_filename, frame.f_lineno
            return _shown(file), line, _text(file, line), function
        if kind == "functional":
            function = frame.f_code.co_name
        frame = frame.f_back
    return "", 0, "", function


@lru_cache(maxsize=4096)
def _kind(code: CodeType) -> str:
    file = code.co_filename
    if file == _FUNCTIONAL:
        return "functional"
    if file.startswith((_TORCH, *_OURS)) or os.path.basename(file) in _GLUE:  # noqa: PTH119
        return "torch"
    return "user"


@lru_cache(maxsize=4096)
def _text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


@lru_cache(maxsize=256)
def _shown(file: str) -> str:
    """Relative to the working folder where it lies inside: runs are copied elsewhere."""
    try:
        return Path(file).relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return file
