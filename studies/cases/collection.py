"""Finds the cases of a half, and tells when one has changed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

FOLDER = Path(__file__).resolve().parent
HALVES = (
    "tuning",
    "tuning_3",
    "opened",
    "opened_2",
    "unseen_2",
    "unseen_3",
    "tuning_4",
    "unseen_4",
)
"""``opened`` and ``opened_2`` were unseen until they were scored; rules may be set by them since."""

for folder in (
    FOLDER.parent,
    FOLDER.parent.parent,
):  # cases import cases.case, or studies.cases.case
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cases.case import Case


def load(half: str, names: list[str] | None = None) -> dict[str, Case]:
    """The cases of a half by name, in the order of its files.

    Raises:
        SystemExit: If there is no such case, or a name stands twice.
    """
    found: dict[str, Case] = {}
    for file in sorted((FOLDER / half).glob("*.py")):
        module = importlib.import_module(f"cases.{half}.{file.stem}")
        for case in getattr(module, "CASES", ()):
            if case.name in found:
                message = f"two cases of {half} are named {case.name}"
                raise SystemExit(message)
            found[case.name] = case
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        message = f"{half} has no case {', '.join(unknown)}; it has {', '.join(found)}"
        raise SystemExit(message)
    return {n: found[n] for n in names} if names else found


def fingerprint(case: Case) -> str:
    """A hash of everything in the collection that decides a case's trainings.

    Its settings, and the source of ``build`` and of all that it refers to in the collection's own
    files, however deep; comments count, other cases of the file do not.
    """
    parts = [f"{case.steps} {case.higher_is_better} {case.margin!r}"]
    parts += sorted(set(_sources(case.build, set())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _sources(thing: Any, seen: set[int]) -> Iterator[str]:  # noqa: C901
    """The source of a function or class, and of what it refers to in the collection."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords, *thing.keywords.values()):
            yield from _sources(part, seen)
    elif isinstance(thing, (FunctionType, type)):
        home = sys.modules.get(thing.__module__)
        if home is None or not _is_ours(home):
            return
        yield inspect.getsource(thing)
        if isinstance(thing, FunctionType):
            for cell in thing.__closure__ or ():
                yield from _sources(cell.cell_contents, seen)
        for name in sorted(_names_in(thing)):
            if hasattr(home, name):
                yield from _sources(getattr(home, name), seen)
    elif isinstance(thing, (bool, int, float, str, tuple, list, dict, frozenset)):
        yield repr(thing)


def _is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and FOLDER in Path(file).resolve().parents


def _names_in(thing: FunctionType | type) -> set[str]:
    """The global names that code refers to, in nested functions and methods, too."""
    if isinstance(thing, type):
        found = {base.__name__ for base in thing.__bases__}
        for member in vars(thing).values():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                found |= _names_in(function)
        return found
    found, waiting = set(), [thing.__code__]
    while waiting:
        code = waiting.pop()
        found.update(code.co_names)
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
    return found
