"""What many libraries spell alike in a name: instruction shape, dtype, generation, alignment."""

from __future__ import annotations

import re
from functools import cache

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernels.rules import DATA

# -- instruction shapes ----------------------------------------------------------------------------

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


# -- generation and alignment ----------------------------------------------------------------------

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
