"""What Triton compiled a kernel to: its own code says whether it multiplies on Tensor Cores.

Triton keeps the PTX (AMD: the assembly) of each kernel in its cache, ``~/.triton/cache``, and
tritonparse logs it. Kernels are matched by the name that their code exports, the name in a trace.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.kernel_evidence import KernelEvidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SUFFIXES = (".ptx", ".amdgcn")
MOST_BYTES = 64 * 2**20
"""Longer code is not read; a kernel's has kilobytes."""

_EXPORTED = re.compile(r"\.entry\s+([\w$]+)|\.amdhsa_kernel\s+([\w$.]+)")
_TYPE = r"(?:tf32|bf16|f16|f64|e4m3|e5m2|e2m1|e3m2|e2m3|s8|u8|s4|u4|b1)"
_PTX = re.compile(
    r"^[^/\n]*?\b(?P<instruction>wgmma\.mma_async|tcgen05\.mma|wmma\.mma|mma(?=\.s[yp]))(?P<rest>[\w.:]*)",
    re.MULTILINE,
)
_OPERANDS = re.compile(rf"\.(?:f32|f16|f64|s32)\.(?P<operand>{_TYPE})\.{_TYPE}\b")
_KIND = re.compile(r"kind::(\w+)")
_AMD = re.compile(
    r"^\s*v_(?P<instruction>mfma|smfmac|wmma|swmmac)(?:_scale)?_(?:f32|f64|i32|f16|bf16)_"
    r"(?P<shape>\d+x\d+x\d+)_?(?P<operand>xf32|bf16|f16|f32|f64|fp8|bf8|f8f6f4|i8|iu8|iu4)",
    re.MULTILINE,
)
_DTYPES = {
    "tf32": "tf32", "xf32": "tf32", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64",
    "e4m3": "fp8_e4m3", "fp8": "fp8_e4m3", "e5m2": "fp8_e5m2", "bf8": "fp8_e5m2", "s8": "int8",
    "u8": "int8", "i8": "int8", "iu8": "int8", "s4": "int4", "u4": "int4", "iu4": "int4", "b1": "int1",
    "e2m1": "fp4", "mxf4": "fp4", "mxf4nvf4": "fp4",
}  # fmt: skip
_INSTRUCTIONS = {
    "wgmma.mma_async": "HGMMA",
    "tcgen05.mma": "UTCHMMA",
    "wmma.mma": "HMMA",
    "mma": "HMMA",
}


def read_code(place: Path) -> dict[str, KernelEvidence]:
    """What the compiled code says of each kernel, by the name in its code.

    Variants of one name that disagree on Tensor Cores decide nothing and are left out; those that
    disagree on the dtype leave it out.

    Args:
        place: A folder that holds PTX or AMD assembly, at any depth, or a log of tritonparse.

    Raises:
        InputError: If there is no such place, or it holds no compiled kernel.
    """
    variants: dict[str, set[KernelEvidence]] = defaultdict(set)
    for source, code in _codes(place):
        for name in _exported(code):
            variants[name].add(_judged(code, source))
    if not variants:
        message = (
            f"{place} holds no compiled Triton kernel: no *.ptx, *.amdgcn or log of tritonparse"
        )
        raise DamagedTrace(message)
    agreed = ((name, _agreed(list(found))) for name, found in variants.items())
    return {name: evidence for name, evidence in agreed if evidence is not None}


def code_of(name: str, codes: Mapping[str, KernelEvidence]) -> KernelEvidence | None:
    """The evidence of a kernel of a trace; some profilers add ``.kd`` to AMD's names."""
    return codes.get(name.removesuffix(".kd"))


def _codes(place: Path) -> Iterator[tuple[str, str]]:
    """The name of each file of code, and its text."""
    if place.is_file():
        yield from _logged(place)
        return
    for path in sorted(p for p in place.rglob("*") if p.suffix in SUFFIXES):
        if path.stat().st_size <= MOST_BYTES:
            yield path.name, path.read_text(encoding="utf-8", errors="replace")


def _logged(log: Path) -> Iterator[tuple[str, str]]:
    with log.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    opener: Any = gzip.open if packed else open
    try:
        with opener(log, "rt", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield from _in_event(line)
    except (OSError, EOFError, zlib.error):
        return  # cut off: what was read counts


def _in_event(line: str) -> Iterator[tuple[str, str]]:
    try:
        event = json.loads(line)
    except ValueError:
        return
    payload = event.get("payload") if isinstance(event, dict) else None
    content = payload.get("file_content") if isinstance(payload, dict) else None
    for name, code in content.items() if isinstance(content, dict) else ():
        if isinstance(code, str) and str(name).endswith(SUFFIXES):
            yield str(name), code


def _exported(code: str) -> set[str]:
    return {next(filter(None, found)) for found in _EXPORTED.findall(code)}


def _judged(code: str, source: str) -> KernelEvidence:
    """Whether code holds a matrix instruction, which, and of which operands."""
    amd = list(_AMD.finditer(code))
    ptx = list(_PTX.finditer(code))
    if not amd and not ptx:
        return KernelEvidence("code", False, f"no matrix instruction in {source}")
    found = amd[0] if amd else ptx[0]
    words = f"v_{found['instruction']}" if amd else found["instruction"]
    text = f"{words} in {source}"
    dtypes = {_operand(match) for match in amd or ptx}
    dtype = dtypes.pop() if len(dtypes) == 1 else ""
    if amd:
        instruction = "WMMA" if "wmma" in found["instruction"] else "MFMA"
    else:
        instruction = _INSTRUCTIONS[found["instruction"]]
    return KernelEvidence("code", True, text, dtype=dtype, instruction=instruction)


def _operand(match: re.Match[str]) -> str:
    """The dtype of an instruction's inputs; "" where only its descriptor holds it."""
    groups = match.groupdict()
    if "rest" not in groups:
        return _DTYPES.get(groups["operand"], "")
    kind = _KIND.search(groups["rest"])
    if kind:
        return _DTYPES.get(kind[1], "") if kind[1] != "f16" else ""  # f16 is BF16's kind, too
    operands = _OPERANDS.search(groups["rest"])
    return _DTYPES.get(operands["operand"], "") if operands else ""


def _agreed(variants: list[KernelEvidence]) -> KernelEvidence | None:
    first = variants[0]
    if len({v.tensor_core for v in variants}) > 1:
        return None
    dtypes, kinds = {v.dtype for v in variants}, {v.instruction for v in variants}
    more = f", {len(variants)} variants" if len(variants) > 1 else ""
    return KernelEvidence(
        "code",
        first.tensor_core,
        min(v.text for v in variants) + more,
        dtype=first.dtype if len(dtypes) == 1 else "",
        instruction=first.instruction if len(kinds) == 1 else "",
    )
