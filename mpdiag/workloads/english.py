"""Real English that ships with Python: the language reference's topics and the docstrings.

Documents are the topics of `pydoc_data` (what `help("with")` prints, CPython's language reference)
in the order of their names, then the docstrings in the source files of the standard library, folder
by folder and file by file in the order of their names. Tests, vendored packages and what is
installed beside the library are left out. Every tenth document is held out; the two parts share no
document.

The text depends on the version of Python, so figures are comparable within one version only.
"""

import re
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from mpdiag.workloads.protocol import DataSplit

UNKNOWN = 0
"""The index of every unusual character, and of every word that a vocabulary lacks."""

# A triple-quoted string at the start of a line is a docstring, with few exceptions; searching for
# these is ten times as fast as parsing.
_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""', re.MULTILINE | re.DOTALL)
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip"}
_HELD_OUT = 10  # one in this many documents


@lru_cache(maxsize=2)
def documents(part: DataSplit) -> tuple[str, ...]:
    """The texts of a part, in order."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    found = [topics[name] for name in sorted(topics)]
    for path in _sources(library):
        found += _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace"))
    held_out = part == "test"
    return tuple(t for i, t in enumerate(found) if (i % _HELD_OUT == _HELD_OUT - 1) == held_out)


def _sources(folder: Path) -> Iterator[Path]:
    """The Python files of a folder, itself before its sub-folders, each by name."""
    inside = sorted(folder.iterdir())
    yield from (path for path in inside if path.suffix == ".py")
    for path in inside:
        if path.is_dir() and path.name not in _LEFT_OUT:
            yield from _sources(path)


@lru_cache(maxsize=2)
def characters(part: DataSplit) -> Tensor:
    """The part as indices of characters, [N]: 1 to 95 printable ASCII, 96 a line's end."""
    text = "\n".join(documents(part)).encode("ascii", errors="replace")
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    printable = (codes >= 32) & (codes < 127)
    return torch.where(codes == 10, 96, torch.where(printable, codes - 31, UNKNOWN))


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` pieces of `length` from random places of a text [N]: [count, length]."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]
