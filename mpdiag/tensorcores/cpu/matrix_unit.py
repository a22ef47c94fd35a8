"""How much of the time a CPU spent in its matrix unit (AMX).

Two sources are joined by shape and dtype: torch.profiler says how long every operator took, and
oneDNN's log names the implementation of each primitive. An operation missing from the log stays
unknown, unless the matrix unit cannot have computed it: FP32 products go to MKL, and AMX has no FP32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import percent
from mpdiag.hardware.cpu_instructions import cpu_name, read_instructions
from mpdiag.tensorcores.cpu.advice import findings, to_bf16
from mpdiag.tensorcores.cpu.onednn import OnednnLog
from mpdiag.tensorcores.cpu.operation import UNITS, CpuFacts, CpuOperation
from mpdiag.tensorcores.cpu.padding import paddings
from mpdiag.tensorcores.roofline import speedup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.tensorcores.cpu.onednn import Primitive
    from mpdiag.tensorcores.cpu.operators import OperatorTime
    from mpdiag.tensorcores.work.traced_operation import MatrixWork

SCHEMA_VERSION = 1
NO_LOG = OnednnLog(None, None, (), 0)
"""An empty log."""
_VERDICT = {"matrix": "tensor_core", "vector": "cuda_core", "unknown": "unknown"}


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
        whole = self.time_us
        part = sum(o.time.time_us for o in self.operations if o.verdict == verdict)
        return part / whole if whole else 0.0

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
        whole = self.time_us
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
            "kernel_time_us": whole,
            "tensor_core_fraction": self.tensor_core_fraction,
            "matrix_cuda_core_fraction": self.fraction("cuda_core"),
            "layout_fraction": min(1.0, reorders / whole) if whole else 0.0,
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
    times: Sequence[OperatorTime], log: OnednnLog, device: CpuFacts, *, steps: int = 0
) -> CpuProfile:
    """Join operator times and oneDNN's log into a profile.

    Args:
        times: Times of the operators.
        log: The log of the same steps.
        device: The CPU.
        steps: Number of steps.
    """
    known = _by_shape(log.primitives)
    whole = sum(t.time_us for t in times) or 1.0
    pad = paddings(t.work for t in times)
    judged = tuple(
        replace(_judge(t, known, device, whole), faults=pad.get(t.work) if t.work else None)
        for t in times
    )
    return CpuProfile(device, judged, log.primitives, steps, findings(judged, log, device))


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


# -- joining ---------------------------------------------------------------------------------------

_Key = tuple[str, int, int, int, int, int, str | None]


def _key(work: MatrixWork, flops: int | None = None) -> _Key:
    total = work.flops if flops is None else flops
    return work.kind, work.m, work.n, work.k, work.batch, total, work.dtype


def _by_shape(primitives: Sequence[Primitive]) -> dict[_Key, Primitive]:
    """The longest primitive of each shape and dtype."""
    found: dict[_Key, Primitive] = {}
    for primitive in sorted(primitives, key=lambda p: p.time_us):
        if primitive.work is not None:
            found[_key(primitive.work)] = primitive
    return found


def _primitive_of(work: MatrixWork, known: dict[_Key, Primitive]) -> Primitive | None:
    """The primitive that computed an operation; for a convolution's backward, the input gradient."""
    keys = [_key(work), _key(work, work.flops // 2)]
    if work.kind == "matmul":  # oneDNN may compute the transposed product
        flipped = (work.kind, work.n, work.m, work.k, work.batch, work.flops, work.dtype)
        keys.append(flipped)
    return next((known[k] for k in keys if k in known), None)


def _judge(
    o: OperatorTime, known: dict[_Key, Primitive], device: CpuFacts, whole: float
) -> CpuOperation:
    verdict, evidence = _verdict(o, known, device)
    cause, fix = _cause(o, verdict, device)
    touched = o.time_us if cause not in {"none", "no_tensor_cores", "unknown"} else 0.0
    return CpuOperation(o, verdict, evidence, cause, fix, speedup(touched / whole))


def _verdict(o: OperatorTime, known: dict[_Key, Primitive], device: CpuFacts) -> tuple[str, str]:
    if o.work is None:
        return "other", "no matrix work"
    primitive = _primitive_of(o.work, known)
    if primitive is not None:
        read = primitive.reduced
        note = f", FP32 multiplied in {read.upper()}" if read else ""
        return _VERDICT[primitive.unit], f"onednn: {primitive.implementation}{note}"
    if device.has_amx is False and device.other_unit:
        return "unknown", f"not in oneDNN's log; {device.other_unit} matrix unit is not reported"
    if device.has_amx is False:
        return "cuda_core", "this CPU has no matrix unit"
    if o.work.dtype is not None and o.work.dtype not in device.unit_dtypes:
        return "cuda_core", f"AMX has no {o.work.dtype.upper()}; not in oneDNN's log"
    return "unknown", "not in oneDNN's log"


def _cause(o: OperatorTime, verdict: str, device: CpuFacts) -> tuple[str, str]:
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
    if o.work is not None and o.work.dtype not in device.unit_dtypes:
        return "dtype", to_bf16(o.work, device.unit_dtypes)
    if o.work is not None and min(o.work.m, o.work.n) == 1:
        return "matrix_vector", "take several vectors at once: a larger batch"
    return "library_choice", "oneDNN chose its vector unit: try a larger batch or wider layers"


def _kernels(primitives: Sequence[Primitive]) -> list[dict[str, Any]]:
    """The implementations, longest total time first."""
    groups: dict[tuple[str, str, str | None, str], list[Primitive]] = {}
    for p in primitives:
        shape = "" if p.work is None else f"{p.work.m}x{p.work.n}x{p.work.k}"
        groups.setdefault((p.kind, p.implementation, p.dtype, shape), []).append(p)
    rows = []
    for (kind, implementation, dtype, shape), members in groups.items():
        verdict = "layout" if kind == "reorder" else _VERDICT[members[0].unit]
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
