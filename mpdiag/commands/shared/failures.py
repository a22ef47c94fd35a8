"""What is said of a call that fails: a sentence in our words, and its JSON document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA_VERSION = 1
RUNS_A_SCRIPT = ("record", "train")
"""Commands whose words a script follows, with or without ``--`` before it."""
_CHOICE = re.compile(r"'(.*)' is not one of ('.*')\.?", re.DOTALL)
_NUMBERS = {
    "int_parsing": "{input!r} is not a whole number",
    "int_from_float": "{input!r} is not a whole number",
    "float_parsing": "{input!r} is not a number",
    "greater_than_equal": "{input} is too small: the least is {ge}",
    "less_than_equal": "{input} is too large: the most is {le}",
}
"""What typer's library for values finds wrong with a number, by its name for it."""


def asked_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON; what follows ``--`` is a script's own."""
    if "--" in words:
        return "--json" in words[: words.index("--")]
    return "--json" in words and words[0] not in RUNS_A_SCRIPT


def error_document(kind: str, message: str, code: int) -> dict[str, Any]:
    """The document of a command that fails under ``--json``.

    Args:
        kind: The name of the error, as ``mpdiag.errors`` has it.
        message: The sentence that stderr gets.
        code: The exit code.
    """
    error = {"kind": kind, "message": message, "exit_code": int(code)}
    return {"schema_version": SCHEMA_VERSION, "error": error}


def value_sentence(message: str, found: Sequence[Mapping[str, Any]] = ()) -> str:
    """What is wrong with the value of an option, without the words of the library that checks it.

    Args:
        message: As typer has it.
        found: What pydantic found, where typer asked it.
    """
    first = found[0] if found else {}
    if first.get("type") in _NUMBERS:
        bounds = first.get("ctx") or {}
        return _NUMBERS[first["type"]].format(input=first.get("input"), **bounds)
    message = message.removeprefix("Value error, ")
    choice = _CHOICE.fullmatch(message)
    if choice is None:
        return message
    names = [name.strip().strip("'") for name in choice[2].split(",")]
    hint = did_you_mean(choice[1], names)
    return f"{choice[1]!r} is unknown{hint}: choose one of {', '.join(names)}"
