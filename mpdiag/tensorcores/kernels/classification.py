"""Classifies kernels by name: Tensor Cores or not, by which instruction, for which dtype.

The rules are lines of ``data/rules.tsv``; the first that matches decides. Mangled names are read as
their source spells them. A name that no rule knows stays ``unknown``: it is never folded into "no".
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import get_args

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernels.rules import (
    DATA,
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


# s1688gemm, h884cudnn, i16832gemm, d884gemm, s161616 (wmma): accumulator and shape of the instruction.
SHAPE = re.compile(
    r"(?:^|[_<:])(?P<acc>g?[cz]|[shdi])(?P<shape>161616|168256|168128|16864|16832|16816|1688|88128|8832|8816|884)"
    r"(?P<fast>tf32|bf16|f16)?"
    r"(?=(?:sp)?gemm|cudnn|fprop|dgrad|wgrad|conv|xmma|_|trsm|trmm|syrk|symm|herk|hemm|rank)"
)
_ACCUMULATORS = {"s": "fp32", "h": "fp16", "d": "fp64", "i": "int32", "c": "fp32", "z": "fp64"}
_INTEGERS = {"8832": "int4", "16864": "int4", "88128": "int1", "168128": "int1", "168256": "int1"}
_TILE = re.compile(r"tensor(?P<m>8|16)x(?P<n>8)x(?P<k>4|8|16|32|64|128|256)(?=_|$)")
# The instruction of a CUTLASS 2 template: arch::Mma<gemm::GemmShape<16, 8, 16>, 32, half_t, …
_MMA = re.compile(
    r"arch::Mma<[\w:]*GemmShape<(?P<m>\d+), ?(?P<n>\d+), ?(?P<k>\d+) ?>, ?(?P<lanes>\d+), "
    r"?(?P<operand>[\w:]+(?: char)?)"
)
# Wide instructions of CUTLASS 3: s64x128x16gemm, h64x64x16spgemm, i64x128x32gemm.
_WIDE = re.compile(r"(?:^|_)(?P<acc>[shdicz])\d+x\d+x\d+(?P<fast>tf32|bf16|f16)?(?:sp)?gemm")
_FAST = {"tf32": "tf32", "bf16": "bf16", "f16": "fp16"}
_BY_DTYPE = {
    ("HGMMA", "QMMA"): "QGMMA",
    ("HGMMA", "IMMA"): "IGMMA",
    ("UTCHMMA", "QMMA"): "UTCQMMA",
    ("UTCHMMA", "IMMA"): "UTCIMMA",
}
"""Instructions of Hopper and Blackwell for other dtypes than the 16-bit ones."""
NAMED_BY_SHAPE = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "tf32", "fp4")


def from_shape(shape: re.Match[str], instruction: str, dtype: str) -> tuple[str, str, str]:
    """Instruction, dtype and accumulator of a match of ``SHAPE``."""
    acc, size, fast = shape["acc"][-1], shape["shape"], shape["fast"]
    accumulator = _ACCUMULATORS[acc]
    if fast:
        dtype = _FAST[fast]
    elif acc in "dz":
        dtype = "fp64" if acc == "d" else "complex128"
    elif acc == "c":
        dtype = "complex64"
    elif acc == "h":
        dtype = "fp16"
    elif acc == "i":
        dtype = dtype if dtype.startswith("int") else _INTEGERS.get(size, "int8")
    elif dtype not in NAMED_BY_SHAPE:
        # No 16-bit token: 1688 is TF32; 884 is only for FP16.
        dtype = "tf32" if size in ("1688", "16816") else "fp16"
    size = "16816" if size == "161616" else size  # wmma is compiled to mma of this shape
    if instruction and not instruction.startswith("HMMA"):
        return instruction, dtype, accumulator
    suffix = ".TF32" if dtype == "tf32" or acc == "c" else ""
    return f"{_kind(dtype)}.{size}{suffix}", dtype, accumulator


def _kind(dtype: str) -> str:
    if dtype in ("fp64", "complex128"):
        return "DMMA"
    if dtype.startswith("int"):
        return "IMMA"
    return "QMMA" if dtype.startswith("fp8") else "HMMA"


def from_tile(head: str, instruction: str, dtype: str) -> tuple[str, str]:
    """Instruction and accumulator of a name that spells a tile, or nothing."""
    accumulator = "int32" if dtype.startswith("int") else "fp32"
    if dtype in ("fp64", "complex128"):
        accumulator = "fp64"
    tile = _TILE.search(head) or _MMA.search(head)
    if tile and (not instruction or instruction == "HMMA"):
        suffix = ".TF32" if dtype == "tf32" else ""
        instruction = f"{_kind(dtype)}.{tile['m']}{tile['n']}{tile['k']}{suffix}"
    instruction = _BY_DTYPE.get((instruction, _kind(dtype)), instruction)
    if instruction == "UTCHMMA" and dtype == "fp4":
        instruction = "UTCOMMA"
    wide, group = _WIDE.search(head), _XMMA.search(head)
    if wide:
        accumulator = _ACCUMULATORS[wide["acc"]]
    elif group and group["acc"]:
        accumulator = _dtypes_of_tokens().get(group["acc"], accumulator)
    return instruction, accumulator


# -- dtypes ----------------------------------------------------------------------------------------


@cache
def _dtypes_of_tokens() -> dict[str, str]:
    """Dtypes by what libraries call them."""
    return {row["token"]: row["dtype"] for row in read_table(DATA / "dtype_tokens.tsv")}


@cache
def _dtype_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Conventions of libraries first, where the operand is a token; then any token with its dtype."""
    rows = read_table(DATA / "dtypes.tsv")
    patterns = tuple((row["dtype"], re.compile(row["pattern"])) for row in rows)
    return (("", _XMMA), ("", _MMA), *patterns)


_TOKENS = "tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|u8|i4|u4|b1"
# xmma: what is stored, then what is multiplied and accumulated: f32f32_tf32f32_f32, i8f32_i8i32_f32.
_XMMA = re.compile(
    rf"xmma_\w{{0,60}}?_(?:{_TOKENS}|i32)+_(?P<operand>{_TOKENS})(?P<acc>f32|f16|i32|f64)(?=_)"
)
_TENSILE = re.compile(
    r"Cij[a-z]*_A[a-zA-Z]+_B[a-zA-Z]+_"
    r"(?P<type>F8B8N?|B8F8N?|F8N?|B8N?|F6|B6|F4|I8|4xi8|[HBSDCZX])(?:F8|B8|I8|[HBSDCZI])*_?"
)
_TENSILE_TYPES = {
    "H": "fp16", "B": "bf16", "S": "fp32", "D": "fp64", "C": "complex64", "Z": "complex128", "X": "tf32",
    "I8": "int8", "4xi8": "int8", "F4": "fp4",
}  # fmt: skip
# Types that are no operand: of a paged cache, of a scale, of the choice between 16-bit formats.
_NO_OPERAND = re.compile(r"\w*Fp8KVCacheDataType\)?\w*|F16BF16|float_ue\dm\d_t|cuda::std::\w+")


def dtype_of(head: str) -> str:
    """The dtype of a kernel's operands, by the conventions first, then by any token; "" if none."""
    text = _NO_OPERAND.sub("", head)
    tensile = _TENSILE.search(text)
    if tensile:
        return _tensile(tensile, text)
    for dtype, pattern in _dtype_patterns():
        match = pattern.search(text)
        if match is None:
            continue
        if dtype:
            return dtype
        operand, tokens = match["operand"].rpartition("::")[2], _dtypes_of_tokens()
        known = tokens.get(operand) or tokens.get(operand.lower())
        if known:
            return known
    return ""


def _tensile(match: re.Match[str], text: str) -> str:
    kind = match["type"]
    if kind == "S" and re.search(r"_M?X_(?:B|MX|)", text[: match.end() + 6]):
        return "tf32"  # F32XdlMathOp: rounded to XF32
    if kind.startswith("F8"):
        return "fp8_e4m3"
    return "fp8_e5m2" if kind.startswith("B8") else _TENSILE_TYPES.get(kind, "")


_PREFIX = re.compile(
    r"(?:^|[_:<(])(?:sm|SM)_?(\d{2,3})[af]?(?=_|[A-Z<:]|$)|[sS]m(\d{2,3})|[a-z]sm(\d{2,3})(?=\D)"
)
_CUTLASS = re.compile(r"cutlass_(\d\d)_|cutlass3x_sm(\d+)")
_GFX = re.compile(r"ISA(\d+[a-f]?\d*)|(?<![a-z])gfx(\d{3,4}[a-f]?|90[a8])")
_NAMED = (
    ("volta", "sm70"),
    ("turing", "sm75"),
    ("ampere", "sm80"),
    ("hopper", "sm90"),
    ("blackwell", "sm100"),
)
_ALIGNED = re.compile(r"_align([a-d]?)(\d+)")


def generation_of(head: str, instruction: str, dtype: str) -> str:
    """The architecture that a kernel was written for, such as ``sm80``; "" if the name gives none."""
    gfx = _GFX.search(head)
    if gfx:
        return f"gfx{gfx[1] or gfx[2]}"
    numbered = _CUTLASS.search(head) or _PREFIX.search(head)
    if numbered:
        digits = next(filter(None, numbered.groups()), "")
        if 30 <= int(digits) <= 130:
            return f"sm{digits}"
    lower = head.lower()
    for name, generation in _NAMED:
        if name in lower:
            return generation
    if instruction.startswith("HMMA."):
        if instruction.endswith("884"):
            return "sm70"
        return "sm75" if instruction.endswith("1688") and dtype == "fp16" else "sm80"
    return {"DMMA.884": "sm80", "IMMA.8816": "sm75", "IMMA.16832": "sm80"}.get(instruction, "")


def alignment_of(head: str) -> int | None:
    """Elements that a kernel's rows must be aligned to, as its name says."""
    alignments = [(which, int(n)) for which, n in _ALIGNED.findall(head) if 0 < int(n) <= 512]
    inputs = [n for which, n in alignments if which in ("", "a", "b")] or [n for _, n in alignments]
    return min(inputs) if inputs else None
