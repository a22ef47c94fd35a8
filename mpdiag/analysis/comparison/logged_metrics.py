"""Which metric a script prints: one that ``compare`` could judge if the script logged it."""

import ast
import os
import re
from pathlib import Path

from mpdiag.analysis.comparison.margins import metric_kind
from mpdiag.errors import InputError
from mpdiag.files.paths import is_remote, place
from mpdiag.runs.run import META, open_run

_MOST_BYTES = 1_000_000
_NAME = r"[A-Za-z][\w@.]*"


def printed_metric(path: str | os.PathLike[str]) -> str:
    """The metric that a run's script prints; "" where none is found or the script is not here.

    Args:
        path: A run folder; any other place gives "".
    """
    where = place(path)
    if is_remote(where) or not (where / META).is_file():
        return ""
    try:
        words = open_run(where).script_words
        script = Path(words[0]) if words and words[0] != "-m" else None
        if script is None or script.stat().st_size > _MOST_BYTES:
            return ""
        return _metric_in(script.read_text(encoding="utf-8"))
    except (InputError, OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""  # it cannot be read, is no Python, or is nested deeper than Python's parser goes


def _metric_in(source: str) -> str:
    """The first score or error rate that a source text prints; "" for none."""
    for call in ast.walk(ast.parse(source)):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "print"
        ):
            shown = " ".join(_shown(argument) for argument in call.args)
            # A name and then its value: "acc {…}", "accuracy: %.3f". Words alone are prose.
            for name in re.findall(rf"({_NAME})[^\w{{%]*[{{%]", shown):
                if _is_metric(name):
                    return str(name)
    return ""


def _is_metric(name: str) -> bool:
    kinds = {metric_kind(name, (), higher_is_better=higher) for higher in (True, False)}
    return bool(kinds & {"score", "error rate", "decibel"})


def _shown(node: ast.expr) -> str:
    """The text that an argument prints, ``{}`` in place of each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shown(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _shown(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _shown(node.func.value) if node.func.attr == "format" else "{}"
    return "{}"
