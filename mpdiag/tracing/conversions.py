"""Dtypes that a training asks of one tensor and gives to another.

A recording is in FP32, where ``p.to(z.dtype)`` and ``x.float()`` do nothing: no operation runs. In
mixed precision the first makes ``p`` as narrow as ``z``, and the second keeps ``x`` wide. This mode sees
both where they are written, and finds whose dtype was asked for.
"""

import ast
import linecache
import os
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Literal, Protocol

import torch

from mpdiag.tracing.dispatch import in_backward, is_traced
from mpdiag.tracing.tap import FunctionTap

Argument = Literal["float32", "attribute", "name", "other"]
"""How a dtype is written: ``torch.float32``, ``z.dtype``, a variable, anything else."""

_DTYPE = torch.Tensor.dtype
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with co_filename
_MODULES = os.path.join(_TORCH, "nn", "modules")  # noqa: PTH118
_TO = frozenset({"to", "type"})
_CALLERS = 3
_ASKED = 256


class Listener(Protocol):
    """Is told of conversions."""

    def asked(self, tensor: torch.Tensor) -> int:
        """The number of a tensor whose dtype is asked for."""

    def mark(self) -> int:
        """How many operations have run; negative where nobody is to be told."""

    def converted(
        self, tensor: torch.Tensor, follows: int | None, since: int, frame: FrameType
    ) -> None:
        """A tensor was given the dtype of another, or FP32 whatever the others are (None).

        Args:
            tensor: The result.
            follows: Number of the other tensor.
            since: How many operations had run before the call.
            frame: Of the code that called.
        """


class Conversions:
    """Watches conversions, and the composite function being called, of one thread.

    Attributes:
        on: Whether the listener is told.
        function: Name of the outermost torch function being called.
    """

    def __init__(self, listener: Listener) -> None:
        self.on = False
        self.function = ""
        self._compiled = _compiled()
        self._tap = FunctionTap(self)
        self._listener = listener
        self._asked: dict[int, tuple[CodeType, int, int]] = {}
        # By the name of the attribute that keeps a tensor's dtype.
        self._stored: dict[str, int] = {}

    def attach(self) -> None:
        """Look at this thread's functions.

        Not where something was compiled since: for a mode, a function would be compiled again.
        """
        if _compiled() <= self._compiled:
            self._tap.attach()

    def detach(self) -> None:
        """Look at them no more."""
        self._tap.detach()

    def restart(self) -> None:
        """Forget whose dtypes were asked for."""
        self._asked.clear()
        self._stored.clear()
        self.function = ""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and look at what it converts."""
        if not self.on or is_traced() or in_backward():
            return func(*args, **kwargs)
        since = self._listener.mark()
        if since < 0:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is _DTYPE:
            result = func(*args, **kwargs)
            if result is torch.float32:
                self._note(args[0], _caller(sys._getframe(2)))
            return result
        name = str(getattr(func, "__name__", ""))
        frame = _caller(sys._getframe(2))
        wanted = self._wanted(name, args, kwargs, frame)
        before, self.function = self.function, name
        try:
            result = func(*args, **kwargs)
        finally:
            self.function = before
        if wanted and isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self._listener.converted(result, wanted[0], since, frame)
        return result

    def _note(self, tensor: torch.Tensor, frame: FrameType) -> None:
        if len(self._asked) >= _ASKED:
            self._asked.clear()
        number = self._listener.asked(tensor)
        self._asked[id(frame)] = frame.f_code, frame.f_lineno, number
        stored = _stored_as(frame.f_code.co_filename, frame.f_lineno)
        if stored:
            self._stored[stored] = number
        asker: FrameType | None = frame
        for _ in range(_CALLERS):  # a property that gives a parameter's dtype, as of a whole model
            if asker is not None and asker.f_code.co_name == "dtype" and asker.f_back is not None:
                caller = asker.f_back
                self._asked[id(caller)] = caller.f_code, caller.f_lineno, number
            asker = None if asker is None else asker.f_back

    def _wanted(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[int | None] | None:
        """Which dtype a call asks for: (a tensor's number,) or (None,) for FP32; None if none."""
        if name == "float":
            return (None,)
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if name == "type_as" or (name == "to" and isinstance(other, torch.Tensor)):
            if isinstance(other, torch.Tensor) and other.dtype is torch.float32:
                return (self._listener.asked(other),)
            return None
        given = [kwargs.get("dtype"), *(args[1:] if name in _TO else ())]
        if not any(g is torch.float32 for g in given):
            return None
        how = written_as(frame.f_code, frame.f_lasti, frame.f_lineno)
        if how == "float32":
            return (None,)
        number = self._number(how, frame)
        if number is None and how == "attribute" and not self._has_asked(frame):
            # No tensor's: what was kept in an attribute, or a constant, which stays FP32.
            return (self._stored.get(_attribute(frame.f_code, frame.f_lasti)),)
        return None if number is None else (number,)

    def _has_asked(self, frame: FrameType) -> bool:
        return self._asked.get(id(frame), (None,))[0] is frame.f_code

    def _number(self, how: Argument, frame: FrameType) -> int | None:
        """Whose dtype it is: asked for on this line, or before by this function or its callers."""
        here: FrameType | None = frame
        for depth in range(_CALLERS):
            if here is None:
                return None
            code, line, number = self._asked.get(id(here), (None, 0, 0))
            if code is here.f_code:
                same = abs(line - here.f_lineno) <= 2
                return number if how == "name" or (depth == 0 and same) else None
            if how != "name":
                return None
            here = here.f_back
        return None


def _caller(frame: FrameType) -> FrameType:
    """The frame that called a function of torch, some of which are written in Python."""
    here: FrameType | None = frame
    while here is not None:
        file = here.f_code.co_filename
        if not file.startswith(_TORCH) or file.startswith(_MODULES):
            return here
        here = here.f_back
    return frame


@lru_cache(maxsize=4096)
def written_as(code: CodeType, instruction: int, line: int) -> Argument:
    """How the call at an instruction writes the dtype that it passes."""
    call = _call(code, instruction)
    if call is None:
        text = linecache.getline(code.co_filename, line)
        if re.search(r"\w\.dtype\b", text):
            return "attribute"
        return "float32" if re.search(r"float32|torch\.float\b", text) else "name"
    found: list[Argument] = [
        _kind(node)
        for node in [*call.args, *(k.value for k in call.keywords if k.arg in ("dtype", None))]
    ]
    ranks: tuple[Argument, ...] = ("float32", "attribute", "name")
    return next((kind for kind in ranks if kind in found), "other")


@lru_cache(maxsize=4096)
def _attribute(code: CodeType, instruction: int) -> str:
    """The attribute that a call passes as dtype: ``kept`` of ``x.to(self.kept)``; empty if unknown."""
    call = _call(code, instruction)
    if call is None:
        return ""
    given = [*call.args, *(k.value for k in call.keywords if k.arg in ("dtype", None))]
    return next(
        (n.attr for n in given if _kind(n) == "attribute" and isinstance(n, ast.Attribute)), ""
    )


@lru_cache(maxsize=4096)
def _stored_as(file: str, line: int) -> str:
    """The attribute that a statement assigns to: ``kept`` of ``self.kept = z.dtype``; else empty."""
    statement = statement_at(file, line)[1]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return next((t.attr for t in targets if isinstance(t, ast.Attribute)), "")


def _kind(node: ast.expr) -> Argument:
    if isinstance(node, ast.Attribute):
        if node.attr in ("float32", "float"):
            return "float32"
        return "other" if node.attr == "device" else "attribute"
    return "name" if isinstance(node, ast.Name) else "other"


@lru_cache(maxsize=4096)
def _call(code: CodeType, instruction: int) -> ast.Call | None:
    """The syntax of a call; None where this Python does not say where it stands (before 3.11)."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return None
    line, last, first_column, last_column = list(positions())[instruction // 2]
    if line is None or last is None:
        return None
    calls = (
        node
        for statement in _statements(code.co_filename)
        if statement.lineno <= line and last <= (statement.end_lineno or 0)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    )
    wanted = (line, last, first_column, last_column)
    found = ((c, (c.lineno, c.end_lineno, c.col_offset, c.end_col_offset)) for c in calls)
    return next((c for c, place in found if place == wanted), None)


@dataclass(frozen=True)
class Alias:
    """A conversion that changed nothing: its result is the very tensor that was converted.

    ``h = x.float()`` makes ``h`` another tensor in mixed precision, and ``x`` stays what it was. In
    FP32 both are one object, so it is the code that tells which is meant.

    Attributes:
        code, frame: The function and its call (an ``id``) that converted.
        lines: First and last line of the statement.
        source, target: Names of what was converted, and of what was assigned; empty where there is none.
        leaves: The statement returns the result.
        temporary: What was converted has no name: it is the result of an expression.
    """

    code: CodeType
    frame: int
    lines: tuple[int, int]
    source: str
    target: str
    leaves: bool
    temporary: bool = False

    def means_converted(self, reader: FrameType | None) -> bool:
        """Whether the frame that reads the tensor now means the converted one."""
        if self.temporary or (self.target and self.target == self.source):
            return True
        while reader is not None and (id(reader) != self.frame or reader.f_code is not self.code):
            reader = reader.f_back
        if reader is None:  # the function has returned
            return bool(self.target) or self.leaves
        if self.lines[0] <= reader.f_lineno <= self.lines[1]:
            return True
        if not self.target:
            return False
        file = self.code.co_filename
        (first, last), *_ = statement_at(file, reader.f_lineno)
        text = "".join(linecache.getline(file, n) for n in range(first, last + 1))
        has = {n: re.search(rf"\b{re.escape(n)}\b", text) for n in (self.source, self.target) if n}
        return bool(has[self.target]) or not has.get(self.source)


def alias_at(frame: FrameType) -> Alias:
    """The alias that a conversion called by a frame makes."""
    lines, statement = statement_at(frame.f_code.co_filename, frame.f_lineno)
    call = _call(frame.f_code, frame.f_lasti)
    value = getattr(statement, "value", None)
    if call is None and isinstance(value, ast.Call):
        call = value
    of = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    source = of.id if isinstance(of, ast.Name) else ""
    target = ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and value is call:
        to = statement.targets[0]
        target = to.id if isinstance(to, ast.Name) and source else ""
    return Alias(
        code=frame.f_code,
        frame=id(frame),
        lines=lines,
        source=source,
        target=target,
        leaves=isinstance(statement, ast.Return),
        temporary=isinstance(of, (ast.Call, ast.BinOp)),
    )


def statement_at(file: str, line: int) -> tuple[tuple[int, int], ast.stmt | None]:
    """First and last line of the innermost statement that stands on a line, and the statement."""
    around = [s for s in _statements(file) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    if not around:
        return (line, line), None
    inner = max(around, key=lambda s: (s.lineno, -(s.end_lineno or s.lineno)))
    if hasattr(inner, "body"):  # the head of a loop or a condition
        return (line, line), None
    return (inner.lineno, inner.end_lineno or inner.lineno), inner


@lru_cache(maxsize=64)
def _statements(file: str) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _compiled() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))
