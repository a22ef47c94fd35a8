"""Where an operation was called from: the line of the user's code, and the module."""

import linecache
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with co_filename
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_OURS = tuple(
    _PACKAGE + room + os.sep
    for room in ("tracing", "recording", "training", "emulation", "sensitivity", "analysis")
)
_GLUE = ("contextlib.py", "functools.py")
_FUNCTIONAL = os.path.join(_TORCH, "nn", "functional.py")  # noqa: PTH118


_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__
Noted = TypeVar("Noted")


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's hook runs in a step inside its own step: a subclass calls its base's."""
    frame, steps = sys._getframe(1), 0
    while frame.f_back is not None and steps < 2:
        frame = frame.f_back
        steps += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
    return steps > 1


class SourceLine(NamedTuple):
    """A line of the user's code, and the module that was being called.

    Attributes:
        module: Name of the module, None outside the models.
        file, line, code: Where it stands, and its text; empty where no frame of the user's calls.
        function: Outermost function of ``torch.nn.functional`` in between, if any.
        number: Of the forward operation that was called there.
    """

    module: str | None
    file: str
    line: int
    code: str
    function: str
    number: int = -1


class ModuleCalls(Generic[Noted]):
    """Follows which module is being called, and which forward operation a backward one belongs to.

    What is noted of a forward operation is found again from the autograd node that its backward
    operations run for. A forward pass recomputed within a backward pass (activation checkpointing)
    differs from the backward pass itself in that modules are called there.

    Args:
        names: Names of modules by ``id``; a module without one takes the name of its caller.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._known = names
        self._noted: dict[int, Noted] = {}
        self._depths: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Begin anew: no module is being called."""
        self._called: list[int] = []
        self._names: list[str | None] = []

    def forget(self) -> None:
        """Forget what was noted of all operations."""
        self._noted.clear()

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        outer = self._names[-1] if self._names else None
        self._called.append(id(module))
        self._names.append(self._known.get(id(module), outer))

    def leave(self, module: nn.Module) -> None:
        """A module has returned, or failed; so have all that it called."""
        if id(module) in self._called:
            while self._called.pop() != id(module):
                self._names.pop()
            self._names.pop()

    @property
    def module(self) -> str | None:
        """Name of the innermost module being called; None outside of all."""
        return self._names[-1] if self._names else None

    def backward_node(self) -> Any:
        """The autograd node that the present operation runs for; None in a forward pass."""
        task = torch._C._current_graph_task_id()
        depth = len(self._names)
        if task == -1 or depth > self._depths.setdefault(task, depth):
            return None
        ask = getattr(torch._C, "_current_autograd_node", None)
        return None if ask is None else ask()

    def note(self, what: Noted) -> None:
        """Note this of the present forward operation, unless its node has a note already."""
        self._noted.setdefault(present_number(), what)

    @property
    def present(self) -> Noted | None:
        """What was noted of the node of the present forward operation."""
        return self._noted.get(present_number())

    def noted(self, node: Any) -> Noted | None:
        """What was noted of the forward operation that made this node."""
        return self._noted.get(node._sequence_nr()) if hasattr(node, "_sequence_nr") else None


def present_number() -> int:
    """Sequence number of the present forward operation's node.

    It is made just before the operation runs, and took the number before the next.
    """
    return torch._C._autograd._get_sequence_nr() - 1


class SourceLines(ModuleCalls[SourceLine]):
    """Finds the line of the user's code that an operation belongs to."""

    def line(self, index: int) -> tuple[SourceLine, str]:
        """Where the present operation comes from, and the autograd node it runs for.

        Args:
            index: Its number, kept for the backward operations that belong to it.
        """
        node = self.backward_node()
        if node is not None:
            return self.noted(node) or SourceLine(None, *locate()), node.name()
        line = self.place(index)
        self.note(line)
        return line, ""

    def take_over(self, earlier: "SourceLines") -> None:
        """Know the forward operations of an earlier step, but not by their numbers in it."""
        noted = earlier._noted.items()
        self._noted = {n: s if s.number < 0 else s._replace(number=-1) for n, s in noted}

    def place(self, index: int) -> SourceLine:
        """The line and module of the present call in a forward pass."""
        return SourceLine(self.module, *locate(), index)


def locate() -> tuple[str, int, str, str]:
    """File, line, text and functional of the user's frame nearest to here.

    Frames of torch and of this package are skipped.
    """
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            file, line = frame.f_code.co_filename, frame.f_lineno
            return _shown(file), line, _text(file, line), function
        if kind == "functional":
            function = frame.f_code.co_name
        frame = frame.f_back
    return "", 0, "", function


def calling_line() -> str:
    """``file:line`` of the frame of the user's own code nearest to here, else of a library's."""
    frame: FrameType | None = sys._getframe(1)
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if _kind(file) == "user" and not file.startswith(_PACKAGE):
            place = f"{_shown(file)}:{frame.f_lineno}"
            if "site-packages" not in file:
                return place
            nearest = nearest or place
        frame = frame.f_back
    return nearest or "an unknown line"


@lru_cache(maxsize=4096)
def _kind(file: str) -> str:
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
    """The path, relative to the working folder if inside it: runs are copied to other machines."""
    try:
        return Path(file).relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return file
