"""Reads the CSV files of ncu and nvprof: a preamble, quoted rows, numbers in many locales."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

LONGEST_FIELD = 1 << 20
"""The longest field, in characters: an unclosed quote turns the rest of the file into one field."""
_TO_US = {"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "µs": 1.0, "usecond": 1.0}
_TO_US |= {"ns": 1e-3, "nsecond": 1e-3, "sec": 1e6, "msec": 1e3, "usec": 1.0, "nsec": 1e-3}


def rows(path: Path) -> Iterator[list[str]]:
    """The rows of a CSV file, without the lines that tools print between them (``==PROF==``)."""
    csv.field_size_limit(LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = (line.replace("\0", "") for line in _lines(file) if not line.startswith("=="))
        yield from csv.reader(lines)


def _lines(file: TextIO) -> Iterator[str]:
    """Lines, without overlong ones: a small compressed file may expand to one huge line."""
    begun = False
    while line := file.readline(LONGEST_FIELD):
        whole = line.endswith("\n") or len(line) < LONGEST_FIELD
        if whole and not begun:
            yield line
        begun = not whole


def number(text: str) -> float | None:
    """A number with thousands separators of either kind; None for anything else."""
    plain = re.sub(r"[\s'’\u00a0\u202f]", "", text)
    commas, points = plain.count(","), plain.count(".")
    if commas and points:  # the later of the two is the decimal point
        if plain.rfind(",") > plain.rfind("."):
            plain = plain.replace(".", "").replace(",", ".")
        else:
            plain = plain.replace(",", "")
    elif commas == 1 and not re.fullmatch(r"-?[1-9]\d{0,2},\d{3}", plain):
        plain = plain.replace(",", ".")
    elif commas:
        plain = plain.replace(",", "")
    elif points > 1:
        plain = plain.replace(".", "")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def microseconds(text: str, unit: str) -> float | None:
    """A time in microseconds, from a unit as NVIDIA's tools spell it."""
    value, factor = number(text), _TO_US.get(unit.strip().lower())
    return None if value is None or factor is None or value < 0 else value * factor
