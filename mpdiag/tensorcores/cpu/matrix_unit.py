"""How much of the time a CPU spent in its matrix unit (AMX), and the findings of such a profile.

Of each operation: where it ran, why not on the matrix unit, what to pad. Two sources are joined by
shape and dtype: torch.profiler says how long every operator took, and oneDNN's log names the
implementation of each primitive. An operation missing from the log stays unknown, unless the matrix
unit cannot have computed it: FP32 products go to MKL, and AMX has no FP32.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpdiag.display.wording import counted, percent
from mpdiag.hardware.alignment import Fault, common_multiples, worth_padding
from mpdiag.hardware.cpu_instructions import CpuInstructions, cpu_name, read_instructions
from mpdiag.hardware.flags import CONVOLUTION, IN_BF16, MEDIUM, RECURRENT
from mpdiag.tensorcores.causes import TILE, misaligned
from mpdiag.tensorcores.cpu.onednn import OnednnLog, Primitive
from mpdiag.tensorcores.profile_findings import note
from mpdiag.tensorcores.roofline import speedup
from mpdiag.tensorcores.work.products import MatrixWork
from mpdiag.tensorcores.work.traced_operation import OperationTime

AMX_DTYPES = frozenset({"bf16", "fp16", "int8"})
"""Dtypes of Intel's AMX: AMX-BF16 and AMX-INT8 since Sapphire Rapids, AMX-FP16 since Granite."""

UNITS = {
    "tensor_core": "matrix unit",
    "cuda_core": "vector unit",
    "unknown": "unknown",
    "layout": "layout conversion",
    "other": "not matrix work",
}
"""What the verdicts of a profile mean on a CPU."""


BF16_LINES = {"matmul": MEDIUM, "attention": MEDIUM, "convolution": CONVOLUTION, "rnn": RECURRENT}
"""The line of a script that lets oneDNN multiply FP32 in BF16, by the kind of work."""
BF16_LOSS = "mpdiag analyze RUN --target bf16 says what BF16 loses"
VERDICTS = {"matrix": "tensor_core", "vector": "cuda_core", "unknown": "unknown"}
"""By the unit of a primitive."""


@dataclass(frozen=True)
class CpuFacts:
    """What is known of the CPU.

    Attributes:
        name: Its model.
        has_amx, has_avx512_bf16: Its instruction sets; None where torch does not say.
        isa: The instruction set that oneDNN detected, in its own words.
        onednn: oneDNN's version.
        threads: Number of threads that torch computes with.
        instructions: All that is known of its instructions; None where nobody asked.
    """

    name: str
    has_amx: bool | None
    has_avx512_bf16: bool | None
    isa: str | None = None
    onednn: str | None = None
    threads: int | None = None
    instructions: CpuInstructions | None = None

    @property
    def unit_dtypes(self) -> frozenset[str]:
        """Dtypes that its AMX multiplies; all that any AMX does where that is not known."""
        known = self.instructions.unit_dtypes if self.instructions is not None else None
        return known or AMX_DTYPES

    @property
    def other_unit(self) -> str:
        """A matrix unit beside AMX, of which neither torch nor oneDNN says whether it is used."""
        if self.instructions is None:
            return ""
        return "Apple's" if self.instructions.apple else "SME" * bool(self.instructions.has("sme"))


@dataclass(frozen=True)
class CpuOperation:
    """An operation with its verdict, in the terms of a GPU profile.

    Attributes:
        time: What ran, and for how long.
        verdict, evidence: Where it ran, and who says so.
        cause, fix: Why not on the matrix unit, and what to do.
        amdahl_bound: The speed-up of the whole if the time that the fix affects vanished.
        faults: What to pad for Tensor Cores; None where alignment does not matter.
    """

    time: OperationTime
    verdict: str
    evidence: str
    cause: str
    fix: str
    amdahl_bound: float
    faults: tuple[Fault, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of ``operations``."""
        o, work = self.time, self.time.work
        return {
            "op": o.op,
            "module": o.module,
            "phase": o.phase,
            **{
                name: getattr(work, name) if work else None
                for name in ("kind", "m", "n", "k", "batch", "dtype")
            },
            "flops": work.flops or None if work else None,
            "bytes": work.bytes or None if work and work.dtype else None,
            "aligned": None if self.faults is None else not self.faults,
            "padded": [
                {"dimension": f.dimension, "size": f.size, "padded": f.padded}
                for f in self.faults or ()
            ],
            "verdict": self.verdict,
            "unit": UNITS[self.verdict],
            "evidence": self.evidence,
            "cause": self.cause,
            "fix": self.fix,
            "calls": o.calls,
            "time_us": o.time_us,
            "amdahl_bound": self.amdahl_bound if self.amdahl_bound < float("inf") else None,
        }


# -- joining ----------------------------------------------------------------------------------------

_Key = tuple[str, int, int, int, int, int, str | None]


def _key(work: MatrixWork, flops: int | None = None) -> _Key:
    total = work.flops if flops is None else flops
    return work.kind, work.m, work.n, work.k, work.batch, total, work.dtype


def judge(
    times: Sequence[OperationTime], primitives: Sequence[Primitive], device: CpuFacts
) -> tuple[CpuOperation, ...]:
    """Each operation with its verdict, its cause and what to pad, by the log of the same steps."""
    known = _by_shape(primitives)
    total_us = sum(t.time_us for t in times) or 1.0
    pad = _paddings(t.work for t in times)
    return tuple(
        _judge(t, known, device, total_us, pad.get(t.work) if t.work else None) for t in times
    )


def _by_shape(primitives: Sequence[Primitive]) -> dict[_Key, Primitive]:
    """The longest primitive of each shape and dtype."""
    longest: dict[_Key, Primitive] = {}
    for primitive in sorted(primitives, key=lambda p: p.time_us):
        if primitive.work is not None:
            longest[_key(primitive.work)] = primitive
    return longest


def _primitive_of(work: MatrixWork, known: dict[_Key, Primitive]) -> Primitive | None:
    """The primitive that computed an operation; for a convolution's backward, the input gradient."""
    keys = [_key(work), _key(work, work.flops // 2)]
    if work.kind == "matmul":  # oneDNN may compute the transposed product
        flipped = (work.kind, work.n, work.m, work.k, work.batch, work.flops, work.dtype)
        keys.append(flipped)
    return next((known[k] for k in keys if k in known), None)


def _judge(
    o: OperationTime,
    known: dict[_Key, Primitive],
    device: CpuFacts,
    total_us: float,
    faults: tuple[Fault, ...] | None,
) -> CpuOperation:
    verdict, evidence = _verdict(o, known, device)
    cause, fix = _cause(o, verdict, device)
    touched = o.time_us if cause not in {"none", "no_tensor_cores", "unknown"} else 0.0
    return CpuOperation(o, verdict, evidence, cause, fix, speedup(touched / total_us), faults)


def _verdict(o: OperationTime, known: dict[_Key, Primitive], device: CpuFacts) -> tuple[str, str]:
    if o.work is None:
        return "other", "no matrix work"
    primitive = _primitive_of(o.work, known)
    if primitive is not None:
        read = primitive.reduced
        note = f", FP32 multiplied in {read.upper()}" if read else ""
        return VERDICTS[primitive.unit], f"onednn: {primitive.implementation}{note}"
    if device.has_amx is False and device.other_unit:
        return "unknown", f"not in oneDNN's log; {device.other_unit} matrix unit is not reported"
    if device.has_amx is False:
        return "cuda_core", "this CPU has no matrix unit"
    if o.work.dtype is not None and o.work.dtype not in device.unit_dtypes:
        return "cuda_core", f"AMX has no {o.work.dtype.upper()}; not in oneDNN's log"
    return "unknown", "not in oneDNN's log"


def _cause(o: OperationTime, verdict: str, device: CpuFacts) -> tuple[str, str]:
    if verdict == "other":
        return "outside", "torch.compile fuses what runs outside matrix products"
    if verdict in {"tensor_core", "unknown"}:
        known = "" if verdict == "tensor_core" else "oneDNN's log does not mention this operation"
        return ("none" if verdict == "tensor_core" else "unknown"), known
    if device.has_amx is False and not device.other_unit:
        better = ""
        if device.has_avx512_bf16 and o.work is not None and o.work.dtype == "fp32":
            better = "; BF16 still doubles the throughput of its AVX-512 unit"
        return "no_tensor_cores", f"this CPU has no matrix unit{better}"
    if o.work is not None and o.work.depthwise:
        return "depthwise", "AMX does not run depthwise convolutions: use fewer, wider groups"
    if o.work is not None and o.work.dtype not in device.unit_dtypes:
        return "dtype", _to_bf16(o.work, device.unit_dtypes)
    if o.work is not None and o.work.kind == "matmul" and min(o.work.m, o.work.n) == 1:
        return "matrix_vector", "take several vectors at once: a larger batch"
    return "library_choice", "oneDNN chose its vector unit: try a larger batch or wider layers"


def _to_bf16(work: MatrixWork, dtypes: frozenset[str]) -> str:
    """The line that brings an operation onto AMX.

    The script stays in FP32: ``"high"`` changes nothing here, and training in BF16 changes more than
    the products.

    Args:
        work: Its matrix work, in a dtype that AMX lacks.
        dtypes: Those that it has.
    """
    line = BF16_LINES.get(work.kind)
    if work.dtype == "fp32" and line is not None and "bf16" in dtypes:
        return f"{line} {IN_BF16}; {BF16_LOSS}"
    return f"run it in BF16 (torch.autocast): AMX multiplies {', '.join(sorted(dtypes)).upper()}"


#
# A CPU hardly minds odd sizes: oneDNN pads what it packs. They matter where the model is to be trained
# on a GPU, so they are judged by the rule of 16-bit formats there, as sizes in a GPU's trace are: a size
# has one padded size, wherever it occurs.

_FORMAT = "fp16"


def _paddings(works: Iterable[MatrixWork | None]) -> dict[MatrixWork, tuple[Fault, ...]]:
    """What to pad in each product, so that none contradicts another; empty for those that fit.

    Products of one vector, depthwise convolutions and products of a single tile are left out:
    alignment is not what keeps these from Tensor Cores. So are those for which padding costs too much.
    """
    alone = {
        work: misaligned(work, _FORMAT, None)
        for work in works
        if work is not None and _counts(work)
    }
    multiples = common_multiples(fault for faults in alone.values() for fault in faults)
    padded = {work: worth_padding(faults, multiples) for work, faults in alone.items()}
    return {work: faults for work, faults in padded.items() if faults or not alone[work]}


def _counts(work: MatrixWork) -> bool:
    if work.depthwise or min(work.m, work.n) <= 1:
        return False
    return work.batch * math.ceil(work.m / TILE) * math.ceil(work.n / TILE) > 1


# -- the profile -----------------------------------------------------------------------------------


SCHEMA_VERSION = 1
_WORTH = 0.05  # share of matrix time from which sizes are worth a finding
_SHOWN = 4  # sizes in a sentence; the evidence has all


@dataclass(frozen=True)
class CpuProfile:
    """What ran on the matrix unit; ``to_json`` has the same fields as a GPU profile.

    Attributes:
        device: The CPU.
        operations: Longest first.
        primitives: All primitives in the log.
        steps: Number of measured steps.
        findings: As documents: severity, code, message, evidence, fix.
    """

    device: CpuFacts
    operations: tuple[CpuOperation, ...]
    primitives: tuple[Primitive, ...]
    steps: int
    findings: tuple[dict[str, Any], ...] = field(default=())

    @property
    def time_us(self) -> float:
        """Time of all operators together."""
        return sum(o.time.time_us for o in self.operations)

    def fraction(self, verdict: str) -> float:
        """The share of operator time with a verdict."""
        total_us = self.time_us
        part = sum(o.time.time_us for o in self.operations if o.verdict == verdict)
        return part / total_us if total_us else 0.0

    @property
    def tensor_core_fraction(self) -> float:
        """The share of operator time on the matrix unit."""
        return self.fraction("tensor_core")

    @property
    def verdict(self) -> str:
        """The shares of operator time, in one sentence."""
        share = percent(self.tensor_core_fraction, 1)
        vector = percent(self.fraction("cuda_core"), 1)
        if self.device.has_amx is False and self.device.other_unit:
            return (
                f"Whether this CPU's matrix unit ({self.device.other_unit}) was used is not known; "
                f"{vector} of operator time is matrix work on its vector unit for certain."
            )
        if self.device.has_amx is False:
            return (
                f"No matrix unit: this CPU has no AMX; {vector} of operator time is matrix work on "
                "its vector unit."
            )
        return (
            f"{share} of operator time is on the matrix unit (AMX), {vector} is matrix work "
            "elsewhere."
        )

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag profile --json``."""
        total_us = self.time_us
        reorders = sum(p.time_us for p in self.primitives if p.kind == "reorder")
        matrix = [o for o in self.operations if o.time.work is not None]
        matrix_us = sum(o.time.time_us for o in matrix)
        seen = sum(o.time.time_us for o in matrix if o.evidence.startswith("onednn:"))
        return {
            "schema_version": SCHEMA_VERSION,
            "source": "onednn",
            "verdict": self.verdict,
            "device": {
                "type": "cpu",
                "name": self.device.name,
                "has_amx": self.device.has_amx,
                "has_avx512_bf16": self.device.has_avx512_bf16,
                "isa": self.device.isa,
                "onednn": self.device.onednn,
                "threads": self.device.threads,
                "instructions": None
                if self.device.instructions is None or self.device.instructions.names is None
                else sorted(self.device.instructions.names),
            },
            "steps": self.steps,
            "kernel_time_us": total_us,
            "tensor_core_fraction": self.tensor_core_fraction,
            "matrix_cuda_core_fraction": self.fraction("cuda_core"),
            "layout_fraction": min(1.0, reorders / total_us) if total_us else 0.0,
            "matrix_unit_fraction": self.tensor_core_fraction,
            "vector_unit_fraction": self.fraction("cuda_core"),
            "unknown_fraction": self.fraction("unknown"),
            "native_generation_fraction": self.tensor_core_fraction,
            "linked_fraction": seen / matrix_us if matrix_us else 0.0,
            "kernels": _kernels(self.primitives),
            "operations": [o.to_json() for o in self.operations],
            "findings": list(self.findings),
        }


def join(
    times: Sequence[OperationTime], log: OnednnLog, device: CpuFacts, *, steps: int = 0
) -> CpuProfile:
    """Join operator times and oneDNN's log of the same steps into a profile."""
    judged = judge(times, log.primitives, device)
    findings = (*_of_unit(judged, log, device), *_of_sizes(judged), *_of_log(log))
    return CpuProfile(device, judged, log.primitives, steps, findings)


def cpu_facts(log: OnednnLog) -> CpuFacts:
    """This machine's CPU, as torch and the log know it."""
    import torch

    def ask(name: str) -> bool | None:
        function = getattr(torch.cpu, name, None)
        return None if function is None else bool(function())

    return CpuFacts(
        name=cpu_name(),
        has_amx=ask("_is_amx_tile_supported"),
        has_avx512_bf16=ask("_is_avx512_bf16_supported"),
        isa=log.isa,
        onednn=log.version,
        threads=torch.get_num_threads(),
        instructions=read_instructions(torch),
    )


def _kernels(primitives: Sequence[Primitive]) -> list[dict[str, Any]]:
    """The implementations, longest total time first."""
    groups: dict[tuple[str, str, str | None, str], list[Primitive]] = {}
    for p in primitives:
        shape = "" if p.work is None else f"{p.work.m}x{p.work.n}x{p.work.k}"
        groups.setdefault((p.kind, p.implementation, p.dtype, shape), []).append(p)
    rows = []
    for (kind, implementation, dtype, shape), members in groups.items():
        verdict = "layout" if kind == "reorder" else VERDICTS[members[0].unit]
        rows.append(
            {
                "name": f"{kind} {implementation}",
                "calls": len(members),
                "time_us": sum(p.time_us for p in members),
                "verdict": verdict,
                "unit": UNITS[verdict],
                "instruction": "AMX" if members[0].unit == "matrix" else None,
                "dtype": dtype,
                "evidence": f"onednn: {implementation}",
                "alignment": None,
                "op": None,
                "module": None,
                "shapes": shape or None,
            }
        )
    return sorted(rows, key=lambda row: -float(str(row["time_us"])))


def _of_unit(
    judged: Sequence[CpuOperation], log: OnednnLog, device: CpuFacts
) -> Iterator[dict[str, Any]]:
    if device.has_amx is False and not device.other_unit:
        yield note(
            "info",
            "no-matrix-unit",
            f"{device.name} has no matrix unit (AMX)",
            "train in mixed precision on a GPU, or a Xeon with AMX",
        )
    used = any(o.verdict == "tensor_core" for o in judged)
    could = [o for o in judged if o.cause == "dtype"]
    if device.has_amx and not used and could:
        yield note(
            "warning",
            "matrix-unit-idle",
            f"{counted(len(could), 'matrix operation')} ran in a dtype that the matrix unit lacks",
            could[0].fix,  # of the one that takes most time
            lines=sorted({BF16_LINES.get(o.time.work.kind, "") for o in could if o.time.work}),
        )
    reduced = [p for p in log.primitives if p.reduced is not None]
    if reduced:
        formats = sorted({str(p.reduced).upper() for p in reduced})
        yield note(
            "info",
            "fp32-multiplied-lower",
            f"FP32 products are multiplied in {' and '.join(formats)} by a setting of torch",
            BF16_LOSS,
            formats=formats,
            time_us=sum(p.time_us for p in reduced),
        )


def _of_sizes(judged: Sequence[CpuOperation]) -> Iterator[dict[str, Any]]:
    odd = [o for o in judged if o.faults]
    matrix_us = sum(o.time.time_us for o in judged if o.time.work is not None)
    share = sum(o.time.time_us for o in odd) / matrix_us if matrix_us else 0.0
    if share < _WORTH:
        return
    pairs = list(dict.fromkeys((f.size, f.padded) for o in odd for f in o.faults or ()))
    sizes = ", ".join(f"{size} → {wider}" for size, wider in pairs[:_SHOWN])
    yield note(
        "info",
        "shapes-for-tensor-cores",
        f"{counted(len(odd), 'product')} ({percent(share)} of matrix time) "
        f"{'has' if len(odd) == 1 else 'have'} sizes that a GPU's Tensor Cores could not read at "
        f"full width: {sizes}{' …' if len(pairs) > _SHOWN else ''}",
        "to train on a GPU, pad them; mpdiag record and mpdiag analyze find sizes that fit together",
        share_of_matrix_time=share,
        sizes=[{"size": size, "padded": wider} for size, wider in pairs],
    )


def _of_log(log: OnednnLog) -> Iterator[dict[str, Any]]:
    if not log.primitives:
        yield note(
            "info",
            "no-log",
            "oneDNN logged nothing in these steps",
            "check torch.backends.mkldnn.is_available()",
        )
    if log.damaged:
        yield note(
            "info",
            "log-damaged",
            f"{log.damaged} lines of oneDNN's log could not be read",
            "report the line",
            lines=log.damaged,
        )
