"""The names that a script gives its models."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

_MAX_HELD = 64  # larger containers are not searched for models


def script_names(things: Sequence[Sequence[Any]]) -> list[str]:
    """Names of the variables that hold some objects: the script's globals first, then locals.

    An object held as an attribute (``self.generator``) gets the attribute's name, one in a dictionary
    its key.

    Args:
        things: Sequences of objects; a variable may hold any object of a sequence (a model, or a
            wrapper around it).

    Returns:
        A name for each sequence, all different; the class's name in lower case if there is no variable.
    """
    owner = {id(one): i for i, group in enumerate(things) for one in group}
    found: dict[int, str] = {}
    main = vars(sys.modules["__main__"])
    scopes: list[Mapping[str, Any]] = [main, *(f.f_locals for f in _frames())]
    for scope in scopes:
        for name, value in [*scope.items()]:
            if name.startswith("_"):
                continue
            for full, held in _held(name, value, owner):
                found.setdefault(owner[id(held)], full)
    names: list[str] = []
    for i, group in enumerate(things):
        base = name = found.get(i, type(group[0]).__name__.lower())
        number = 2
        while name in names:
            name, number = f"{base}{number}", number + 1
        names.append(name)
    return names


def _frames() -> Iterator[FrameType]:
    """Frames of the script and its libraries, the outermost first, without torch's and ours."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "mpdiag", "typer", "click"):
            frames.append(frame)
        frame = frame.f_back
    yield from reversed(frames)


def _held(name: str, value: Any, owner: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    """What a variable holds, with names: the object itself, its entries or its attributes."""
    if id(value) in owner:
        yield name, value
        return
    yield from _entries(name, value, owner)
    if issubclass(type(value), (type, ModuleType)):
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if type(attributes) is dict and "_modules" not in attributes:
        for key, held in [*attributes.items()]:
            if id(held) in owner:
                yield key.lstrip("_"), held
            else:
                yield from _entries(key, held, owner)


def _entries(name: str, value: Any, owner: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    # ``type`` instead of ``isinstance``, which would resolve lazy proxies.
    kind = type(value)
    if kind not in (dict, list, tuple) or len(value) > _MAX_HELD:
        return
    if kind is dict:
        yield from ((k, v) for k, v in value.items() if isinstance(k, str) and id(v) in owner)
    else:
        yield from ((f"{name}{i}", v) for i, v in enumerate(value) if id(v) in owner)
