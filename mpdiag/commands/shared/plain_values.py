"""Values of options and arguments that need no library to be understood, and their plain names.

Typer hands each value to pydantic, whose import takes as long as half of a short analysis. A value
that is plainly what its option takes is therefore converted here. Whatever is not, a wrong one above
all, goes to typer as before, which says what is wrong with it.

In the help an argument has the name declared for it, without Python's type beside it.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand

NOT_PLAIN = object()
"""What stands for a value that typer has to look at."""
_WHOLE = re.compile(r"\d{1,9}")


class PlainCommand(TyperCommand):
    """A command that converts plain values by itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments, ``--help`` among them."""
        return [named_plainly(read_plainly(p)) for p in super().get_params(ctx)]


def read_plainly(parameter: Any) -> Any:
    """Make a parameter of a typer command convert plain values by itself.

    Versions of typer that convert without pydantic are left as they are.

    Args:
        parameter: A ``TyperOption`` or ``TyperArgument``, which is returned.
    """
    own = getattr(parameter, "get_runtime_param", None)
    if own is not None and hasattr(parameter, "type_descriptor") and not isinstance(own, _Reader):
        parameter.get_runtime_param = _Reader(parameter, own)
    return parameter


def named_plainly(parameter: Any) -> Any:
    """Make the help show an argument as declared: ``RUN``, ``[LAYER]``, and no ``<Path>`` behind it.

    Args:
        parameter: A ``TyperOption``, left as it is, or a ``TyperArgument``. It is returned.
    """
    if parameter.param_type_name == "argument" and parameter.metavar:
        parameter.display_type_rich = _no_type
        parameter.get_usage_pieces = partial(_usage, parameter)
    return parameter


def _no_type(ctx: Any) -> str:  # noqa: ARG001 - as typer calls it
    return ""


def _usage(parameter: Any, ctx: Any) -> list[str]:  # noqa: ARG001 - as typer calls it
    name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    open_end = parameter.nargs != 1 and "…" not in name
    return [f"{name}..." if open_end else name]


class _Reader:
    """Stands for the object that converts the values of one parameter."""

    def __init__(self, parameter: Any, typers: Any) -> None:
        self._descriptor = parameter.type_descriptor
        self._many = parameter.multiple or parameter.nargs == -1
        self._typers = typers

    def __call__(self) -> _Reader:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of the parameter's type.

        Raises:
            typer.BadParameter: If it has none.
        """
        annotation, info = self._descriptor.annotation, self._descriptor.parameter_info
        found = plain_values(value, annotation, info) if self._many else NOT_PLAIN
        if not self._many:
            found = plain_value(value, annotation, info)
        return self._typers().coerce(value, param=param, ctx=ctx) if found is NOT_PLAIN else found


def plain_values(value: Any, annotation: Any, info: Any) -> Any:
    """The values of an option that takes many; ``NOT_PLAIN`` if any is not plain."""
    if value is None:
        return ()
    inner = get_args(annotation)
    if not isinstance(value, (list, tuple)) or get_origin(annotation) is not list or not inner:
        return NOT_PLAIN
    found = [plain_value(one, inner[0], info) for one in value]
    return NOT_PLAIN if any(one is NOT_PLAIN or one is None for one in found) else found


def plain_value(value: Any, annotation: Any, info: Any) -> Any:
    """What one typed word, or one default, stands for.

    Args:
        value: The word, or a default.
        annotation: The parameter's type.
        info: What was declared for it: typer's ``OptionInfo`` or ``ArgumentInfo``.

    Returns:
        The value, or ``NOT_PLAIN``.
    """
    if value is None:
        return None
    if info.parser is not None:
        try:
            return info.parser(value)
        except ValueError:
            return NOT_PLAIN
    if annotation is str or get_origin(annotation) is Literal:
        known = isinstance(value, str) and (annotation is str or value in get_args(annotation))
        return value if known and info.path_type is None else NOT_PLAIN
    if annotation is int:
        return _number(value, info)
    if annotation is Path and isinstance(value, str):
        return _path(value, info)
    return NOT_PLAIN


def _number(value: Any, info: Any) -> Any:
    whole = isinstance(value, str) and _WHOLE.fullmatch(value) is not None and value.isascii()
    if info.clamp or isinstance(value, bool) or not (whole or isinstance(value, int)):
        return NOT_PLAIN
    number = int(value)
    low = info.min is not None and number < info.min
    high = info.max is not None and number > info.max
    return NOT_PLAIN if low or high else number


def _path(value: str, info: Any) -> Any:
    asked = (info.exists, info.writable, info.resolve_path, info.allow_dash, info.path_type)
    if any(asked) or not (info.file_okay and info.dir_okay):
        return NOT_PLAIN
    if info.readable and os.path.lexists(value) and not os.access(value, os.R_OK):
        return NOT_PLAIN
    return Path(value)
