"""Reads the CSV files of profilers: a preamble, quoted rows, numbers in many locales."""

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

GZIP = b"\x1f\x8b"
DELIMITERS = ",;\t"
"""What separates columns: Excel writes semicolons where the comma is the decimal point."""

LONGEST_FIELD = 1 << 20
"""The longest field, in characters: an unclosed quote turns the rest of the file into one field."""
_DIGITS = 300
_TO_US = {"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "µs": 1.0, "usecond": 1.0}
_TO_US |= {"ns": 1e-3, "nsecond": 1e-3, "sec": 1e6, "msec": 1e3, "usec": 1.0, "nsec": 1e-3}


def rows(path: Path, delimiter: str = ",") -> Iterator[list[str]]:
    """The rows of a CSV file, without the lines that tools print between them (``==PROF==``)."""
    with open_text(path) as file:
        yield from parsed(lines(file), delimiter)


def parsed(text: Iterator[str], delimiter: str = ",") -> Iterator[list[str]]:
    """Lines as rows of a CSV file, without those that tools print between them."""
    csv.field_size_limit(LONGEST_FIELD)
    plain = (line.replace("\0", "") for line in text if not line.startswith("=="))
    return csv.reader(plain, delimiter=delimiter)


def encoding(head: bytes) -> str:
    """The encoding of a text that begins so: PowerShell redirects into UTF-16."""
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, plain or gzip, of any of the usual encodings; wrong bytes are replaced."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        raw = cast("io.BufferedReader", gzip.GzipFile(fileobj=file) if packed else file)
        try:
            head = raw.peek(2)[:2]
        except (OSError, EOFError):  # not gzip after all
            head = b""
        yield io.TextIOWrapper(raw, encoding(head), errors="replace", newline="")


def lines(file: TextIO, longest: int | None = None) -> Iterator[str]:
    """Lines, without overlong ones: a small compressed file may expand to one huge line.

    A compressed file that was cut off ends where it was cut.
    """
    begun, longest = False, longest or LONGEST_FIELD
    while line := uncut(file.readline, longest):
        whole = line.endswith("\n") or len(line) < longest
        if whole and not begun:
            yield line
        begun = not whole


def uncut(read: Callable[[int], str], most: int) -> str:
    """What is read of a text, so many characters at the most; "" where a gzip file was cut off."""
    try:
        return read(most)
    except (OSError, EOFError):
        return ""
    except Exception as error:  # zlib.error is not an OSError
        if type(error).__name__ != "error":
            raise
        return ""


def number(text: str) -> float | None:
    """A number with thousands separators of either kind; None for anything else."""
    if text.isdecimal():  # the usual case
        return float(text) if len(text) < _DIGITS else None
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
