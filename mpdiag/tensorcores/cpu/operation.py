"""A CPU and what is known of an operation that it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpdiag.hardware.alignment import Fault
    from mpdiag.hardware.cpu_instructions import CpuInstructions
    from mpdiag.tensorcores.cpu.operators import OperatorTime

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

    time: OperatorTime
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
            "kind": work.kind if work else None,
            "m": work.m if work else None,
            "n": work.n if work else None,
            "k": work.k if work else None,
            "batch": work.batch if work else None,
            "dtype": work.dtype if work else None,
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
