"""Classifies kernels by name: Tensor Cores or not, by which instruction, for which dtype.

The rules are in ``kernel_rules.py``, in the order they are tried; the first match decides.
A name that no rule knows stays ``unknown``: it is never folded into "no".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mpdiag.hardware.kernel_rules import RULES, TABLE_VERSION, KernelRule

KernelVerdict = Literal["tensor_core", "cuda_core", "helper", "layout", "other", "unknown"]
VERDICTS: tuple[KernelVerdict, ...] = (
    "tensor_core",
    "cuda_core",
    "helper",
    "layout",
    "other",
    "unknown",
)
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
LONGEST = 16_384
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
        table_version: Version of the table of rules.
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
    table_version: int = TABLE_VERSION


@lru_cache(maxsize=65_536)
def classify(name: str) -> KernelFacts:
    """Classify a kernel by its name alone.

    Args:
        name: Demangled, if the trace has it so; the short names of ``nsys`` say too little.
    """
    head = _head(name[:LONGEST])
    for rule in RULES:
        match = rule.pattern.search(head)
        if match:
            return _facts(rule, match, head)
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


_NAMESPACE = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous namespace\)|^void\s+")
_TEMPLATE_CAST = re.compile(r"\((?:unsigned )?(?:int|long|bool|char|short)\)")


def _head(name: str) -> str:
    """The name without arguments, anonymous namespaces, and ``(int)`` before numbers."""
    text = _TEMPLATE_CAST.sub("", _NAMESPACE.sub("", name.strip()))
    depth = 0
    for i, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and i and not text[:i].endswith("operator"):
            return text[:i]
    return text


def _facts(rule: KernelRule, match: re.Match[str], head: str) -> KernelFacts:
    verdict: KernelVerdict = rule.verdict
    if verdict not in ("tensor_core", "cuda_core"):
        return KernelFacts(verdict, library=rule.library, rule=rule.name, token=match.group())
    shape = _SHAPE.search(head)
    instruction, dtype = rule.instruction, rule.dtype or _dtype(head)
    accumulator = "fp32" if verdict == "tensor_core" else dtype
    if verdict == "tensor_core" and shape:
        instruction, dtype, accumulator = _from_shape(shape, instruction, dtype)
    elif verdict == "tensor_core":
        instruction, accumulator = _from_tile(head, instruction, dtype)
    if dtype == "fp64" or rule.accumulator:
        accumulator = rule.accumulator or "fp64"
    return KernelFacts(
        verdict,
        instruction,
        dtype,
        accumulator,
        _generation(head, instruction, dtype) or rule.generation,
        _alignment(head),
        rule.library,
        rule.name,
        match.group(),
    )


# -- details that many libraries spell alike -------------------------------------------------------

# s1688gemm, h884cudnn, i16832gemm, d884gemm, s161616 (wmma): accumulator and shape of the instruction.
_SHAPE = re.compile(
    r"(?:^|[_<:])(?P<acc>[shdi])(?P<shape>161616|16864|16832|16816|16128|1688|8832|8816|884)"
    r"(?P<fast>tf32|bf16|f16)?(?=gemm|cudnn|fprop|dgrad|wgrad|conv|xmma|_|trsm|syrk|symm)"
)
_ACCUMULATORS = {"s": "fp32", "h": "fp16", "d": "fp64", "i": "int32"}
_TILE = re.compile(r"tensor(?P<m>8|16)x(?P<n>8)x(?P<k>4|8|16|32|64)(?=_|$)")
# The first match names the dtype, so tf32 precedes f32, and bf16 precedes f16.
_DTYPES = (
    ("fp8_e4m3", r"e4m3|(?:^|_)f8(?=_)|fp8|float8"),
    ("fp8_e5m2", r"e5m2"),
    ("fp4", r"e2m1|xf4|(?:^|_)f4(?=_)"),
    ("tf32", r"tf32|tfloat32"),
    ("bf16", r"bf16|BF16|bfloat16|BFloat16|Bfloat16|_BBS_|_BSS_|DF16b"),
    (
        "fp16",
        r"(?:^|_|[^bn])f16|\dF16|F16F16|hgemm|fp16|__half|\bhalf\b|_HHS_|_HSS_|_HHH_|half_t|_hmma_|_HMMA",
    ),
    ("int8", r"i8i8|(?:^|_)s8|int8|_I8|(?:^|_)u8"),
    ("fp64", r"f64|(?<!float_)double|dgemm|_DB_"),
    ("complex64", r"cgemm|gcgemm"),
    ("complex128", r"zgemm"),
    ("fp32", r"f32|fp32|float|sgemm|scudnn|_SB_"),
)
_DTYPES_COMPILED = tuple((name, re.compile(text)) for name, text in _DTYPES)
_PREFIX = re.compile(r"(?:^|[_:<(])sm_?(\d{2,3})[af]?(?=_|[A-Z<]|$)|[sS]m(\d{2,3})")
_CUTLASS = re.compile(r"cutlass_(\d\d)_|cutlass3x_sm(\d+)")
_GFX = re.compile(r"ISA(\d+[a-f]?\d*)")
_NAMED = (("volta", "sm70"), ("turing", "sm75"), ("ampere", "sm80"), ("hopper", "sm90"))
_ALIGNED = re.compile(r"_align([a-d]?)(\d+)")


def _from_shape(shape: re.Match[str], instruction: str, dtype: str) -> tuple[str, str, str]:
    acc, size, fast = shape["acc"], shape["shape"], shape["fast"]
    accumulator = _ACCUMULATORS[acc]
    if fast:
        dtype = {"tf32": "tf32", "bf16": "bf16", "f16": "fp16"}[fast]
    elif acc == "d":
        dtype = "fp64"
    elif acc == "h":
        dtype = "fp16"
    elif acc == "i":
        dtype = dtype if dtype == "int8" else "int8"
    elif dtype not in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "tf32"):
        # No 16-bit token: 1688 is TF32; 884 is only for FP16.
        dtype = "tf32" if size in ("1688", "16816") else "fp16"
    kind = {"d": "DMMA", "i": "IMMA"}.get(acc, "QMMA" if dtype.startswith("fp8") else "HMMA")
    size = "16816" if size == "161616" else size  # wmma is compiled to mma of this shape
    if instruction and not instruction.startswith("HMMA"):
        return instruction, dtype, accumulator
    suffix = ".TF32" if dtype == "tf32" else ""
    return f"{kind}.{size}{suffix}", dtype, accumulator


def _from_tile(head: str, instruction: str, dtype: str) -> tuple[str, str]:
    accumulator = {"int8": "int32", "fp64": "fp64"}.get(dtype, "fp32")
    tile = _TILE.search(head)
    if tile and (not instruction or instruction == "HMMA"):
        kind = {"int8": "IMMA", "fp64": "DMMA"}.get(dtype, "HMMA")
        kind = "QMMA" if dtype.startswith("fp8") else kind
        suffix = ".TF32" if dtype == "tf32" else ""
        instruction = f"{kind}.{tile['m']}{tile['n']}{tile['k']}{suffix}"
    if instruction == "HGMMA" and dtype.startswith("fp8"):
        instruction = "QGMMA"
    if instruction == "HGMMA" and dtype == "int8":
        instruction = "IGMMA"
    return instruction, accumulator


def _dtype(head: str) -> str:
    for name, pattern in _DTYPES_COMPILED:
        if pattern.search(head):
            return name
    return ""


def _generation(head: str, instruction: str, dtype: str) -> str:
    gfx = _GFX.search(head)
    if gfx:
        return f"gfx{gfx[1]}"
    numbered = _CUTLASS.search(head) or _PREFIX.search(head)
    if numbered:
        return f"sm{numbered[1] or numbered[2]}"
    lower = head.lower()
    for name, generation in _NAMED:
        if name in lower:
            return generation
    if instruction.startswith("HMMA."):
        if instruction.endswith("884"):
            return "sm70"
        return "sm75" if instruction.endswith("1688") and dtype == "fp16" else "sm80"
    return {"DMMA.884": "sm80", "IMMA.8816": "sm75", "IMMA.16832": "sm80"}.get(instruction, "")


def _alignment(head: str) -> int | None:
    found = [(which, int(n)) for which, n in _ALIGNED.findall(head) if 0 < int(n) <= 512]
    inputs = [n for which, n in found if which in ("", "a", "b")] or [n for _, n in found]
    return min(inputs) if inputs else None
