"""A line of the table of kernel names, and short ways to write one of each verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


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
    verdict: Literal["tensor_core", "cuda_core", "helper", "layout", "other", "unknown"]
    library: str = ""
    instruction: str = ""
    dtype: str = ""
    generation: str = ""
    accumulator: str = ""
    of_words: bool = False


def helper(name: str, pattern: str, library: str = "") -> KernelRule:
    """It serves a matrix kernel."""
    return KernelRule(name, re.compile(pattern), "helper", library)


def layout(name: str, pattern: str, library: str = "") -> KernelRule:
    """It converts between memory layouts."""
    return KernelRule(name, re.compile(pattern), "layout", library)


def cuda(
    name: str, pattern: str, library: str = "", dtype: str = "", instruction: str = "FFMA"
) -> KernelRule:
    """Matrix math on CUDA cores (AMD: on vector units)."""
    return KernelRule(name, re.compile(pattern), "cuda_core", library, instruction, dtype)


def tensor(
    name: str, pattern: str, library: str, instr: str = "HMMA", dtype: str = "", sm: str = ""
) -> KernelRule:
    """Matrix math on Tensor Cores (AMD: on matrix cores)."""
    return KernelRule(name, re.compile(pattern), "tensor_core", library, instr, dtype, sm)


def other(name: str, pattern: str, library: str = "") -> KernelRule:
    """Known, and not matrix math."""
    return KernelRule(name, re.compile(pattern), "other", library)


def other_words(name: str, pattern: str) -> KernelRule:
    """Not matrix math, by the words of its name."""
    return KernelRule(name, re.compile(pattern), "other", of_words=True)


def cuda_words(name: str, pattern: str) -> KernelRule:
    """Matrix math on CUDA cores, by the words of its name."""
    return KernelRule(name, re.compile(pattern), "cuda_core", of_words=True)


def helper_words(name: str, pattern: str) -> KernelRule:
    """It serves a matrix kernel, by the words of its name."""
    return KernelRule(name, re.compile(pattern), "helper", of_words=True)


def tensor_words(name: str, pattern: str, library: str) -> KernelRule:
    """Matrix math on Tensor Cores, by the words of its name."""
    return KernelRule(name, re.compile(pattern), "tensor_core", library, of_words=True)


def opaque(name: str, pattern: str, library: str = "") -> KernelRule:
    """The name does not say what it runs."""
    return KernelRule(name, re.compile(pattern), "unknown", library)


def opaque_words(name: str, pattern: str) -> KernelRule:
    """The words of the name say matrix math, but not how."""
    return KernelRule(name, re.compile(pattern), "unknown", of_words=True)


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
        own = _ACRONYM.sub(lambda found: found[0].capitalize(), own)
    private = "_" if own.startswith("_") else ""
    return f"{private}_{_HUMPS.sub('_', own).strip('_').lower()}_"
