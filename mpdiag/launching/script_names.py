"""What a script calls its models."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

_MAX_HELD = 64  # of a container that might hold models


def script_names(things: Sequence[Sequence[Any]]) -> list[str]:
    """The variables that hold some things: globals of the script first, then its functions' locals.

    Of an object with attributes (``self.generator``) the attribute counts, of a dictionary the key.

    Args:
        things: Each a sequence of objects, any of which may be what the variable holds (a model,
            and what is wrapped around it).

    Returns:
        A name for each, all different; the class's name in lower case where there is no variable.
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
    """Frames of the script and of what it uses, the outermost first, without torch's and ours."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "mpdiag", "typer", "click"):
            frames.append(frame)
        frame = frame.f_back
    yield from reversed(frames)


def _held(name: str, value: Any, owner: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    """Names of what a variable holds: itself, its entries, or its attributes and theirs."""
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
    # ``type`` and not ``isinstance``, which would wake lazy proxies.
    kind = type(value)
    if kind not in (dict, list, tuple) or len(value) > _MAX_HELD:
        return
    if kind is dict:
        yield from ((k, v) for k, v in value.items() if isinstance(k, str) and id(v) in owner)
    else:
        yield from ((f"{name}{i}", v) for i, v in enumerate(value) if id(v) in owner)
