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
    from collections.abc import Mapping
    from types import CodeType, FrameType

    from torch import nn

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


class Places:
    """Follows which module is being called, and which forward operation a backward one belongs to.

    Args:
        modules: Names of modules by ``id``.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self._modules = modules
        self._sites: dict[int, Site] = {}
        self._depths: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """No module is being called."""
        self._called: list[int] = []
        self._names: list[str | None] = []

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        outer = self._names[-1] if self._names else None
        self._called.append(id(module))
        self._names.append(self._modules.get(id(module), outer))

    def leave(self, module: nn.Module) -> None:
        """A module has returned, or failed; so have all that it called."""
        if id(module) in self._called:
            while self._called.pop() != id(module):
                self._names.pop()
            self._names.pop()

    def site(self, index: int) -> tuple[Site, str]:
        """Where the present operation comes from, and the autograd node it runs for.

        Args:
            index: Its number, kept for the backward operations that belong to it.
        """
        task = torch._C._current_graph_task_id()
        depth = len(self._names)
        if task != -1 and depth <= self._depths.setdefault(task, depth):
            ask = getattr(torch._C, "_current_autograd_node", None)
            node = None if ask is None else ask()
            if node is not None:
                number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
                known = self._sites.get(number)
                return known if known is not None else Site(None, *locate()), node.name()
        module = self._names[-1] if self._names else None
        site = Site(module, *locate(), index)
        # The node of this operation was made just before, and took the number before the next.
        self._sites.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
        return site, ""


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
