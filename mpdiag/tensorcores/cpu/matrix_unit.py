"""How much of the time a CPU spent in its matrix unit (AMX), and the findings of such a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import counted, percent
from mpdiag.hardware.cpu_instructions import cpu_name, read_instructions
from mpdiag.tensorcores.cpu.operation import (
    BF16_LINES,
    BF16_LOSS,
    UNITS,
    VERDICTS,
    CpuFacts,
    CpuOperation,
    judge,
)
from mpdiag.tensorcores.profile_findings import note

if TYPE_CHECKING:
    from mpdiag.tensorcores.cpu.onednn import OnednnLog, Primitive
    from mpdiag.tensorcores.work.traced_operation import OperationTime

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
    """Join operator times and oneDNN's log into a profile.

    Args:
        times: Times of the operators.
        log: The log of the same steps.
        device: The CPU.
        steps: Number of steps.
    """
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


# -- findings ---------------------------------------------------------------------------------------


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
        "to train on a GPU, pad them; mpdiag record and mpdiag analyze prove which fit together",
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
