"""Classifies kernels by name: Tensor Cores or not, by which instruction, for which dtype.

The rules are lines of ``data/rules.tsv``; the first that matches decides. Mangled names are read as
their source spells them. A name that no rule knows stays ``unknown``: it is never folded into "no".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from mpdiag.tensorcores.kernels.details import (
    SHAPE,
    alignment_of,
    dtype_of,
    from_shape,
    from_tile,
    generation_of,
)
from mpdiag.tensorcores.kernels.rules import (
    KernelRule,
    KernelVerdict,
    rules,
    says_nothing,
    words,
)

VERDICTS: tuple[KernelVerdict, ...] = get_args(KernelVerdict)
_NATIVE = {
    7: ("sm70", "sm72"),
    8: ("sm80", "sm86", "sm87", "sm89"),
    9: ("sm90",),
    10: ("sm100", "sm101", "sm103"),
    12: ("sm80", "sm89", "sm120", "sm121"),
}
"""Architectures whose kernels a device runs at its own full rate, by major compute capability."""
_NATIVE_TURING = ("sm75",)
_NATIVE_AMD = {
    (9, 0): ("gfx90a", "gfx908"),
    (9, 4): ("gfx942", "gfx940", "gfx941"),
    (9, 5): ("gfx950",),
}
LONGEST = 8_192
"""Characters of a name that are read; longer names are cut."""


@dataclass(frozen=True)
class KernelFacts:
    """What a kernel's name says.

    Attributes:
        verdict: ``tensor_core``: matrix math on Tensor Cores (AMD: matrix cores); ``cuda_core``:
            matrix math elsewhere; ``helper``: serves a matrix kernel (split-K reduction, Winograd
            transform); ``layout``: converts between NCHW and NHWC; ``other``: known, not matrix
            math; ``unknown``: the name does not say.
        instruction: Such as ``HMMA.16816``, ``HGMMA``, ``FFMA``; empty if the name does not say.
        dtype: Of the inputs, such as ``fp16``, ``tf32``, ``fp8_e4m3``; empty where unknown.
        accumulator: Such as ``fp32``.
        generation: The architecture the kernel was written for (``sm80``, ``gfx90a``), which may be
            older than the GPU it runs on.
        alignment: Elements that the kernel needs aligned, as its name says.
        library: The library it comes from.
        rule: Name of the rule that matched; empty if none did.
        token: The part of the name that matched.
    """

    verdict: KernelVerdict
    instruction: str = ""
    dtype: str = ""
    accumulator: str = ""
    generation: str = ""
    alignment: int | None = None
    library: str = ""
    rule: str = ""
    token: str = ""


@lru_cache(maxsize=65_536)
def classify(name: str) -> KernelFacts:
    """Classify a kernel by its name alone.

    Args:
        name: Demangled or not; the short names of ``nsys`` say too little.
    """
    text = _spelled_out(name[:LONGEST])
    head = _head(text)
    spelled = words(head)
    arguments = text[len(head) :]
    for rule in rules():
        match = rule.pattern.search(spelled if rule.of_words else head)
        if match:
            exact = rule.of_words and rule.verdict == "unknown" and multiplies_only(text, arguments)
            return _exact(rule, match, exact) if exact else _facts(rule, match, head)
    around = words(head, around=True)
    if around != spelled:
        for rule in rules():
            match = rule.pattern.search(around) if rule.of_words else None
            if match:
                return _facts(rule, match, head)
    if arguments and not says_nothing(spelled) and takes_no_two_matrices(arguments):
        return KernelFacts("other", rule="arguments", token=arguments)
    return KernelFacts("unknown")


def native_generations(capability: tuple[int, int], *, amd: bool) -> tuple[str, ...]:
    """The architectures whose Tensor Core kernels use a device's own instructions.

    Args:
        capability: Compute capability, major and minor, as torch reports it.
        amd: Whether the device is AMD's, whose capabilities overlap with NVIDIA's.

    Returns:
        As in ``KernelFacts.generation``; () where the device is not known.
    """
    if amd:
        return _NATIVE_AMD.get(capability, ())
    return _NATIVE_TURING if capability == (7, 5) else _NATIVE.get(capability[0], ())


_NAMESPACE = re.compile(
    r"^(?:typename )?std::enable_if<.{0,400}?>::type\s+|\(anonymous namespace\)::|<unnamed>::"
    r"|\(anonymous namespace\)|^void\s+"
)
_TEMPLATE_CAST = re.compile(r"\((?:unsigned )?(?:int|long|bool|char|short)\)")
# Arguments whose types say how the kernel multiplies.
_TELLING = re.compile(
    r"cutlass\w*::(?:gemm|conv)::kernel::|cutensor_internal_namespace::KernelParam"
    r"|(?<=\()Array<\w+, (?:int=)?\d, "  # Numba's
)
_SUFFIX = re.compile(r"\.kd$| \[clone [^\]]*\]$")


def _spelled_out(name: str) -> str:
    """The name as its source spells it, without anonymous namespaces and ``(int)`` before numbers."""
    text = demangled(_SUFFIX.sub("", name.strip()))[:LONGEST]
    return _TEMPLATE_CAST.sub("", _NAMESPACE.sub("", text))


def _head(text: str) -> str:
    """What precedes the arguments, unless they tell more."""
    depth = 0
    for i, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and i and not text[:i].endswith("operator"):
            return text if _TELLING.search(text, i) else text[:i]
    return text


def _exact(rule: KernelRule, match: re.Match[str], dtype: str) -> KernelFacts:
    """A product of arrays of ``float`` or ``double`` in a program's own kernel."""
    instruction = "FFMA" if dtype == "fp32" else "DFMA"
    return KernelFacts("cuda_core", instruction, dtype, dtype, rule=rule.name, token=match.group())


def _facts(rule: KernelRule, match: re.Match[str], head: str) -> KernelFacts:
    verdict: KernelVerdict = rule.verdict
    if verdict not in ("tensor_core", "cuda_core"):
        return KernelFacts(verdict, library=rule.library, rule=rule.name, token=match.group())
    shape = SHAPE.search(head)
    instruction, dtype = rule.instruction, rule.dtype or dtype_of(head)
    if verdict == "tensor_core" and dtype == "fp32" and instruction not in ("MFMA", "WMMA", ""):
        dtype = "tf32"  # NVIDIA's Tensor Cores multiply no FP32
    accumulator = "fp32" if verdict == "tensor_core" else dtype
    if verdict == "tensor_core" and shape:
        instruction, dtype, accumulator = from_shape(shape, instruction, dtype)
    elif verdict == "tensor_core":
        instruction, accumulator = from_tile(head, instruction, dtype)
    if dtype == "fp64" or rule.accumulator:
        accumulator = rule.accumulator or "fp64"
    return KernelFacts(
        verdict,
        instruction,
        dtype,
        accumulator,
        generation_of(head, instruction, dtype) or rule.generation,
        alignment_of(head),
        rule.library,
        rule.name,
        match.group(),
    )


# -- arguments -------------------------------------------------------------------------------------

# What the arguments of a demangled name rule out. Two arrays are no two factors and a product. And a
# kernel of a program's own that multiplies arrays of ``float`` runs on Tensor Cores only if it rounds
# them to a shorter type, which its name then says.
_NUMBER = (
    r"(?:const )?(?:(?:unsigned |signed )?(?:char|short|int|long long|long)|unsigned|bool|float|double"
    r"|size_t|u?int\d+_t|__half2?|half2?|(?:__nv_|__hip_)?bfloat16|(?:float|double|int|uint|char|uchar)[234]"
    r"|_Float16|c10::(?:Half|BFloat16))(?: const)?"
)
_SCALAR = re.compile(rf"{_NUMBER}&?")
_ARRAY = re.compile(rf"{_NUMBER} ?\*(?: ?(?:const|__restrict__))*")
_INDICES = re.compile(
    r"(?:const )?(?:unsigned )?(?:int|long)(?: const)? ?\*(?: ?(?:const|__restrict__))*"
)
_EXACT = re.compile(
    r"(?:const )?(?P<type>float|double)(?: const)? ?\*(?: ?(?:const|__restrict__))*"
)
_SHORTER = re.compile(
    r"tf32|tensor|mma|mfma|xdl|half|[bfh]p?f?16|hgemm|(?<![a-z])tc(?![a-z])", re.IGNORECASE
)
FACTORS_AND_PRODUCT = 3
"""Arrays that a product of two matrices takes: its factors and its result."""


def takes_no_two_matrices(arguments: str) -> bool:
    """Whether all arguments are numbers and at most two arrays of numbers.

    One that could hold further arrays (a structure, a pointer to pointers, a type of the program)
    rules nothing out, nor does a list that was cut off.

    Args:
        arguments: From the opening parenthesis on.
    """
    arrays = _arrays(arguments)
    return arrays is not None and 0 < len(arrays) < FACTORS_AND_PRODUCT


def multiplies_only(name: str, arguments: str) -> str:
    """``fp32`` or ``fp64`` if a product of these arrays is on CUDA cores, else "".

    Args:
        name: The whole name; it says nothing of a shorter type or of Tensor Cores.
        arguments: From the opening parenthesis on: numbers, and arrays of ``float`` or ``double``,
            three at least, and of indices.
    """
    arrays = _arrays(arguments)
    if arrays is None or _SHORTER.search(name):
        return ""
    exact = [_EXACT.fullmatch(array) for array in arrays if not _INDICES.fullmatch(array)]
    types = {match["type"] if match else "" for match in exact}
    if len(exact) < FACTORS_AND_PRODUCT or len(types) != 1:
        return ""
    return {"float": "fp32", "double": "fp64"}.get(types.pop(), "")


def _arrays(arguments: str) -> list[str] | None:
    """The arguments that are arrays, or None if others could be as well."""
    inside, closed, rest = arguments[1:].rpartition(")")
    if not closed or rest.strip():
        return None
    arrays = []
    for argument in inside.split(","):
        text = argument.strip()
        if _ARRAY.fullmatch(text):
            arrays.append(text)
        elif not _SCALAR.fullmatch(text):
            return None
    return arrays


# -- mangled names ----------------------------------------------------------------------------------

# Whole or cut off, so that one table serves both spellings.
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
        piece = _PIECE.match(name, i)
        if piece is None:
            i += 1
            continue
        i = piece.end()
        if piece["length"]:
            length = int(piece["length"][:5])
            text.append(name[i : i + length])
            i += length
        elif piece["half"]:
            text.append("_Float16" if piece["half"] == "_" else "__bf16")
        elif piece["value"]:
            text.append(piece["value"])
        elif piece["type"]:
            text.append(_TYPES[piece["type"]])
        if piece["open"] and text:
            text.append("<")
    return _joined(text)


def _joined(pieces: list[str]) -> str:
    """Identifiers joined as scopes before the first template argument, as arguments after it."""
    end = pieces.index("<") if "<" in pieces else len(pieces)
    arguments = ", ".join(piece for piece in pieces[end:] if piece != "<")
    return "::".join(pieces[:end]) + (f"<{arguments}>" if arguments else "")
