"""Reads mangled C++ names, whole or cut off, so that one table serves both spellings."""

from __future__ import annotations

import re

MANGLED = "_Z"


def demangled(name: str) -> str:
    """A name as its source spells it; names that are not mangled stay as they are.

    A name that the library cannot read (it was cut off, it is none, or the library is not
    installed) is read as far as its identifiers go: they are written out in full in it.
    """
    if not name.startswith(MANGLED):
        return name
    return _by_library(name) or identifiers(name)


def _by_library(name: str) -> str:
    """As the library reads it: it is bounded in time and size, whatever the name; "" if it fails."""
    try:
        import demangle
    except ImportError:  # Python 3.10
        return ""
    try:
        text: str = demangle.demangle_strict(name, language="itanium")
    except demangle.DemanglingError:
        return ""
    return text


_TYPES = {
    "f": "float",
    "d": "double",
    "i": "int",
    "a": "signed char",
    "h": "unsigned char",
    "t": "unsigned short",
}
_PIECE = re.compile(
    r"(?P<length>[1-9]\d*)"
    r"|DF16(?P<half>[_b])"
    r"|L[a-z](?P<value>n?\d+)E"
    r"|S[0-9A-Z]*_|S[tasbiod]|T[0-9]*_|[NKPRO]"
    r"|(?P<open>I)|(?P<close>E)|(?P<type>[fdiaht])"
)


def identifiers(name: str) -> str:
    """The identifiers, numbers and plain types of a mangled name, in their order.

    It follows no back references, so its length is at most that of the name and a little.
    """
    text, i = [], len(MANGLED)
    while i < len(name):
        found = _PIECE.match(name, i)
        if found is None:
            i += 1
            continue
        i = found.end()
        if found["length"]:
            length = int(found["length"][:5])
            text.append(name[i : i + length])
            i += length
        elif found["half"]:
            text.append("_Float16" if found["half"] == "_" else "__bf16")
        elif found["value"]:
            text.append(found["value"])
        elif found["type"]:
            text.append(_TYPES[found["type"]])
        if found["open"] and text:
            text.append("<")
    return _joined(text)


def _joined(pieces: list[str]) -> str:
    """Identifiers joined as scopes before the first template argument, as arguments after it."""
    end = pieces.index("<") if "<" in pieces else len(pieces)
    arguments = ", ".join(piece for piece in pieces[end:] if piece != "<")
    return "::".join(pieces[:end]) + (f"<{arguments}>" if arguments else "")
