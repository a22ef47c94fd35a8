"""The table of kernel names, from ``data/rules.tsv``, and the words that a name consists of."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from mpdiag.hardware.tables import lines_of, read_table

KernelVerdict = Literal["tensor_core", "cuda_core", "helper", "layout", "other", "unknown"]

TABLE_VERSION = 7
"""Incremented whenever a rule changes a verdict."""
DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class KernelRule:
    """One line of the table; empty fields are read from the name itself.

    Attributes:
        name: Of the rule, once in the table.
        pattern: Searched in the name without its argument list.
        verdict, library, instruction, dtype, generation, accumulator: As in ``KernelFacts``.
        of_words: Search the words of the name instead, as ``words`` writes them.
    """

    name: str
    pattern: re.Pattern[str]
    verdict: KernelVerdict
    library: str
    instruction: str
    dtype: str
    generation: str
    accumulator: str
    of_words: bool


@cache
def rules() -> tuple[KernelRule, ...]:
    """The whole table, in the order in which it is tried."""
    return tuple(
        KernelRule(
            row["name"],
            re.compile(_expanded(row["pattern"])),
            cast("KernelVerdict", row["verdict"]),
            row["library"],
            row["instruction"],
            row["dtype"],
            row["generation"],
            row["accumulator"],
            row["reads"] == "words",
        )
        for row in read_table(DATA / "rules.tsv")
    )


@cache
def _fragment(name: str) -> str:
    """A pattern that others share, or any word of a list."""
    listed = DATA / f"{name}.txt"
    if listed.is_file():
        return "|".join(word for line in lines_of(listed) for word in line.split())
    (pattern,) = (
        row["pattern"] for row in read_table(DATA / "fragments.tsv") if row["name"] == name
    )
    return _expanded(pattern)


def _expanded(pattern: str) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: _fragment(match[1]), pattern)


@cache
def _nothing() -> re.Pattern[str]:
    return re.compile(_fragment("nothing"))


def says_nothing(spelled: str) -> bool:
    """Whether any kernel could have these words.

    Args:
        spelled: As ``words`` returns them.
    """
    return _nothing().fullmatch(spelled) is not None


MOST_WORDS = 400
"""Characters of a function's own name whose words are read."""
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
# Words that their humps would tear apart.
_ACRONYM = re.compile(r"(?:Re|Ge|Si|Se|Ce)LU|GLU|RoPE|MoE|LoRA|IoU|RoI|NaN")
_SAYS_NOTHING = re.compile(
    r"(?:global_)?(?:kernel|run|impl|apply|entry|main|device)?_?(?:kernel)?\d*"
)
_ONE_WORD = re.compile(r"_?(?:[A-Z]?[a-z]+|[A-Z]+)\d*")
# Libraries and models whose own names hold a word that says another thing.
_LIBRARY = re.compile(r"(?:fbgemm|FBGEMM)_?(?:gpu)?|(?:[gG]emma|GEMMA)(?![a-z])\d*n?")


def words(head: str, *, around: bool = False) -> str:
    """The words of a function's own name, lower case, between single underscores.

    Its namespaces are left out, unless the name itself says nothing; a single word takes the one
    around it along, for ``internode::combine`` says more than ``combine``. A name that begins with an
    underscore begins with two: so do Triton's, which are Python's, but hardly any of C++.

    Args:
        head: The name without its arguments; template arguments are left out.
        around: Take the namespace around it along, however many words it has.
    """
    own = head.partition("<")[0][:MOST_WORDS]
    namespaces, _, last = own.rpartition("::")
    if not _SAYS_NOTHING.fullmatch(last):
        along = namespaces and (around or _ONE_WORD.fullmatch(last))
        own = f"{namespaces.rpartition('::')[2]}_{last}" if along else last
    if "gemm" in own.lower():
        own = _LIBRARY.sub("library_", own)
    if _ACRONYM.search(own):
        own = _ACRONYM.sub(lambda match: match[0].capitalize(), own)
    private = "_" if own.startswith("_") else ""
    return f"{private}_{_HUMPS.sub('_', own).strip('_').lower()}_"
