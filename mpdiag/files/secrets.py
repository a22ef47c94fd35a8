"""Tokens, keys and passwords, which no file and no message may show.

A name is split at its separators and capitals (``hfToken``, ``X-Amz-Signature``), and is secret if one
of its parts is. Some words have harmless uses, too (``--max-tokens 512``, ``--pad-token``): a short
number, a truth value, or another word beside them tells.
"""

import re
from collections.abc import Iterable

HIDDEN = "(hidden)"
"""What stands in a document for a token, a key or a password."""

_SECRET = frozenset(
    """
    accesskey apikey bearer credential credentials passphrase passwd password passwords privatekey pwd
    sas secret secretkey secrets
    """.split()
)
_PERHAPS = frozenset("auth authorization jwt key pass sig signature token tokens".split())
"""Secret, unless the value is a short number or a truth value."""
_OF_MODELS = frozenset(
    "bos class cls eos image mask pad sep sort special start stop unk primary padding".split()
)
"""Beside ``token`` or ``key``: a word of a vocabulary, a column of a table."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_HARMLESS = re.compile(
    r"[-+]?(\d{1,8}|\d{0,6}\.\d{0,6})(e[-+]?\d{1,3})?|true|false|yes|no|none|null|auto|on|off",
    re.IGNORECASE,
)
# A password may hold "@" and "/"; what follows a host's ":" in digits is a port.
_LOGIN = re.compile(r"(?<=://)(?:[^/?#\s:@]*:(?!\d+(?:/|$))[^?#\s]*|[^/?#\s]+)(?=@)")
_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=([^&#\s]*)")
_PAIR = re.compile(
    r"""([\w.-]+)(["']?\s*[=:]\s*["']?)((?:(?:bearer|basic|token)\s+)?[^\s"',;&}]+)""",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(bearer|basic)\s+(?!\(hidden\))\S+", re.IGNORECASE)
_OPTION = re.compile(r"--|-[A-Za-z]$")


def is_secret(name: str, value: str) -> bool:
    """Whether a value of this name may not be shown."""
    parts = {part.lower() for part in _PART.findall(name)}
    if parts & _SECRET:
        return True
    return bool(parts & _PERHAPS and not parts & _OF_MODELS and _HARMLESS.fullmatch(value) is None)


def without_secrets(text: str) -> str:
    """A text without logins and query values of URLs, and without values of secret names in it."""

    def query(match: re.Match[str]) -> str:
        name, value = match.groups()
        shown = _HARMLESS.fullmatch(value) is not None and not is_secret(name, value)
        return match.group() if shown or not value else f"{name}={HIDDEN}"

    def pair(match: re.Match[str]) -> str:
        name, between, value = match.groups()
        return f"{name}{between}{HIDDEN}" if is_secret(name, value) else match.group()

    if "://" in text:
        text = _QUERY.sub(query, _LOGIN.sub(HIDDEN, text))
    return _SCHEME.sub(rf"\1 {HIDDEN}", _PAIR.sub(pair, text))


def shown_arguments(words: Iterable[str]) -> list[str]:
    """A command line in which the values of secret names are hidden.

    Everything between a secret option and the next option is a value of it.
    """
    shown: list[str] = []
    option = ""  # the secret one whose values come
    for word in words:
        if option and not _OPTION.match(word):
            hidden = is_secret(option, word)
            shown.append(HIDDEN if hidden else word)
            option = option if hidden else ""
            continue
        name, equals, value = word.partition("=")
        named = name.startswith("-") or "://" not in name
        if equals and named and " " not in name and is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(without_secrets(word))
        option = word if word.startswith("-") and not equals and is_secret(word, "x") else ""
    return shown
