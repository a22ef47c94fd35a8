"""Evidence, other than its name, of whether a kernel used Tensor Cores.

Hardware counters are the strongest evidence, then a kernel's own code, then the rate, then the name.
A kernel that multiplies faster than the ordinary cores can must have used Tensor Cores, whatever its
name; a low rate proves nothing. Which counters prove or deny what is in ``kernels/counters.py``.

Triton keeps the PTX (AMD: the assembly) of each kernel in its cache, ``~/.triton/cache``, and
tritonparse logs it. Kernels are matched by the name that their code exports, the name in a trace.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.peaks import Peaks
from mpdiag.tensorcores.events import Kernel
from mpdiag.tensorcores.kernels import counters
from mpdiag.tensorcores.kernels.classification import KernelFacts
from mpdiag.tensorcores.kernels.counters import CounterMeaning
from mpdiag.tensorcores.kernels.rules import KernelVerdict
from mpdiag.tensorcores.work.traced_operation import OperationTime

MARGIN = 1.1
"""The factor by which a rate must exceed the published one: clocks may exceed the boost clock."""
FLOP_PER_CLOCK = {8: 512, 9: 512, 10: 512, 12: 256, 7: 256}
"""The most that the ordinary cores of one multiprocessor do, by major capability: FP16 in pairs
(CUDA C++ Programming Guide, arithmetic throughput)."""

SLIGHT = 5.0
"""Percent of the pipe's peak below which its use may be HFMA2.MMA alone, where that runs on it."""

# Words of operations and kernels that multiply matrices or vectors, if they are not known otherwise.
_MATRIX = re.compile(
    r"gemm|gemv|matmul|mat_?mul|mul_mat|\bmm\b|_mm_|_mm\b|bmm|linear|conv(?!ert|ersion)|attention|attn"
    r"|\bmha|\bmla|fmha|sdpa|flash|decode|prefill|_dot|dot_|einsum|lstm|\bgru\b|trsm|mmvq",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class KernelEvidence:
    """Evidence for or against a kernel's use of Tensor Cores.

    Attributes:
        kind: ``"counters"``, ``"rate"``, or ``"code"``: its machine-level code.
        tensor_core: Whether it used them.
        text: The numbers behind it.
        certain: Whether nothing else explains the numbers.
        dtype: Of the inputs, as in ``KernelFacts.dtype``; empty where the evidence does not say.
        instruction: Such as ``DMMA``; empty where the evidence does not say.
    """

    kind: Literal["counters", "rate", "code"]
    tensor_core: bool
    text: str
    certain: bool = True
    dtype: str = ""
    instruction: str = ""


def by_counters(
    runs: Iterable[Kernel], capability: tuple[int, int] | None = None
) -> KernelEvidence | None:
    """Evidence from hardware counters; None if those that were measured decide nothing.

    A counter of matrix instructions that is not zero proves them. They are denied only if every kind
    that the generation has was counted, and was zero: a counter that is absent is no zero.

    Args:
        runs: The measured runs of one kernel.
        capability: Compute capability of the GPU; None where it is not known.
    """
    highest: dict[str, float] = {}
    for run in runs:
        for name, value in (run.counters or {}).items():
            highest[name] = max(value, highest.get(name, 0.0))
    meanings = {name: counters.meaning(name, capability) for name in highest}
    known = {name: found for name, found in meanings.items() if found is not None}
    certain, shared, zeros = dict[str, float](), dict[str, float](), list[str]()
    for name, found in known.items():
        value = highest[name]
        counted = counters.without_hfma2(name, highest) if found.shared and value > 0 else None
        if (value if counted is None else counted) <= 0:
            zeros.append(name)
        elif found.shared and counted is None:
            shared[name] = value
        else:
            certain[name] = value if counted is None else counted
    if certain:
        return _proof(certain, known)
    if shared:
        return _shared_pipe(shared)
    return _denial(zeros, known, capability)


def _proof(certain: Mapping[str, float], known: Mapping[str, CounterMeaning]) -> KernelEvidence:
    name = max(certain, key=lambda n: (known[n].paths == counters.WHOLE, certain[n]))
    said = {known[n].dtype for n in certain if known[n].dtype}
    kinds = {known[n].instruction for n in certain if known[n].instruction}
    return KernelEvidence(
        "counters",
        True,
        f"{name} = {certain[name]:g}",
        dtype=said.pop() if len(said) == 1 else "",
        instruction=kinds.pop() if len(kinds) == 1 else "",
    )


def _shared_pipe(shared: Mapping[str, float]) -> KernelEvidence | None:
    """The pipe was used, perhaps by HFMA2.MMA; None if so little that it may have been that alone."""
    percent = [value for name, value in shared.items() if ".pct_of_peak" in name]
    if percent and max(percent) < SLIGHT:
        return None
    name = max(shared, key=lambda n: (".pct_of_peak" in n, shared[n]))
    text = f"{name} = {shared[name]:g}, HFMA2.MMA included"
    return KernelEvidence("counters", True, text, certain=False)


def _denial(
    zeros: Sequence[str], known: Mapping[str, CounterMeaning], capability: tuple[int, int] | None
) -> KernelEvidence | None:
    if not zeros:
        return None
    whole = [name for name in zeros if known[name].paths == counters.WHOLE]
    paths = frozenset[str]().union(*(known[name].paths for name in zeros))
    if not counters.covers(paths, capability, known[zeros[0]].vendor):
        return None
    return KernelEvidence("counters", False, f"{', '.join(whole[:1] or zeros)} = 0")


def by_measured_rate(runs: Iterable[Kernel], device: DeviceFacts | None) -> KernelEvidence | None:
    """Evidence from a run's own FLOP, time and clock, where ncu measured the clock."""
    major = device.capability[0] if device and device.capability else None
    a_clock = FLOP_PER_CLOCK.get(major or 0)
    for run in runs:
        found: Mapping[str, float] = run.counters or {}
        processors, clock = found.get("# SMs"), found.get("SM Frequency")
        if not (a_clock and run.flops and run.duration_us and processors and clock):
            continue
        rate, limit = run.flops / run.duration_us * 1e6, processors * clock * a_clock
        if rate > limit:
            return KernelEvidence("rate", True, _rates(rate, limit))
    return None


def by_rate(operation: OperationTime, peaks: Peaks | None) -> KernelEvidence | None:
    """Evidence from an operation's rate: proof of Tensor Cores, or None.

    Only matrix products count: Winograd and FFT convolutions do less arithmetic than their shapes
    imply.

    Args:
        operation: What ran.
        peaks: The device's rates, or upper bounds of them: a bound proves as well.
    """
    work = operation.work
    if peaks is None or work is None or work.kind != "matmul" or operation.time_us <= 0:
        return None
    dtype = work.dtype or operation.dtype
    if dtype is None or dtype.startswith(("fp8", "fp6", "fp4")):
        dtype = "fp16"  # ordinary cores convert these first
    elif dtype.startswith("int"):
        dtype = "int8"  # they have dot products of integers, faster than FP16
    rate = work.least_flops * operation.calls / operation.time_us * 1e6
    limit = peaks.cuda_rate(dtype)
    return KernelEvidence("rate", True, _rates(rate, limit)) if rate > MARGIN * limit else None


def _rates(rate: float, limit: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s, CUDA cores do at most {limit / 1e12:.1f}"


def measured_verdict(
    facts: KernelFacts, measured: KernelEvidence | None, words: str = ""
) -> KernelVerdict:
    """The verdict by the name, corrected by what was measured.

    Args:
        facts: What the name says.
        measured: What was measured.
        words: The kernel's and its operation's names. If no matrix instruction ran in a kernel that
            no rule knows, they say whether it is matrix work at all.
    """
    if measured is None or (measured.tensor_core and facts.verdict == "tensor_core"):
        return facts.verdict
    if measured.tensor_core:
        # The rate of a product says nothing about helpers and additions that ran with it.
        matrix = facts.verdict in ("cuda_core", "unknown")
        overrules = matrix or (measured.kind != "rate" and measured.certain)
        return "tensor_core" if overrules else facts.verdict
    if facts.verdict == "tensor_core":
        return "cuda_core"
    if facts.verdict == "unknown":
        return "cuda_core" if _MATRIX.search(words) else "other"
    return facts.verdict


def contradicts(facts: KernelFacts, measured: KernelEvidence | None) -> bool:
    """Whether the measurement says the opposite of the name; an unknown name is no contradiction."""
    if measured is None:
        return False
    if measured.tensor_core:
        firm = measured.kind != "rate" and measured.certain
        against = {"cuda_core"} | ({"other", "layout"} if firm else set())
        return facts.verdict in against
    return facts.verdict == "tensor_core"


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


def read_code(place: Path, *, needed: bool = True) -> dict[str, KernelEvidence]:
    """What the compiled code says of each kernel, by the name in its code.

    Variants of one name that disagree on Tensor Cores decide nothing and are left out; those that
    disagree on the dtype leave it out.

    Args:
        place: A folder that holds PTX or AMD assembly, at any depth, or a log of tritonparse.
        needed: Whether a place without a compiled kernel is an error.

    Raises:
        InputError: If a compiled kernel is needed, and the place holds none or does not exist.
    """
    variants: dict[str, set[KernelEvidence]] = defaultdict(set)
    for source, code in _codes(place):
        for name in {next(filter(None, groups)) for groups in _EXPORTED.findall(code)}:
            variants[name].add(_judged(code, source))
    if not variants and needed:
        raise DamagedTrace(
            f"{place} holds no compiled Triton kernel: no *.ptx, *.amdgcn, code of inductor "
            "or log of tritonparse"
        )
    agreed = ((name, _agreed(list(found))) for name, found in variants.items())
    return {name: evidence for name, evidence in agreed if evidence is not None}


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
