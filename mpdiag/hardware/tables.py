"""Reads tables of facts: one row a line, tab between columns, ``#`` before a comment."""

import csv
from pathlib import Path


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are neither blank nor comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table by the names in its first line; no quoting, so a field may hold quotes.

    Empty fields at the end of a row may be left out.
    """
    lines = lines_of(path)
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""))
