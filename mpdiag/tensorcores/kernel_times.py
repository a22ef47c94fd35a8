"""The kernels of a trace with their times, and shares of that time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.tensorcores import kernel_evidence

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.tensorcores.kernel_evidence import KernelEvidence
    from mpdiag.tensorcores.kernels.classification import KernelFacts
    from mpdiag.tensorcores.kernels.rules import KernelVerdict


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel for one operation and module.

    Attributes:
        name: As the trace has it.
        facts: What its name says.
        calls, time_us: Number of runs, and their time in all.
        op, module, shapes: The operation that launched it; empty where it could not be linked.
        measured: What counters or rates say of it; None where they say nothing.
    """

    name: str
    facts: KernelFacts
    calls: int
    time_us: float
    op: str = ""
    module: str = ""
    shapes: tuple[Any, ...] = ()
    measured: KernelEvidence | None = None

    @property
    def measured_verdict(self) -> KernelVerdict:
        """The verdict by the strongest evidence: counters, then rates, then the name."""
        return kernel_evidence.measured_verdict(self.facts, self.measured, f"{self.op} {self.name}")

    def to_json(self) -> dict[str, Any]:
        """An entry of ``kernels``."""
        rule = (
            f"name: {self.facts.rule} ({self.facts.token})" if self.facts.rule else "name: no rule"
        )
        return {
            "name": self.name,
            "calls": self.calls,
            "time_us": self.time_us,
            "verdict": self.facts.verdict,
            "verdict_witnessed": self.measured_verdict,
            "instruction": self.facts.instruction or None,
            "instruction_witnessed": (self.measured.instruction if self.measured else "") or None,
            "dtype": self.facts.dtype or None,
            "dtype_witnessed": (self.measured.dtype if self.measured else "") or None,
            "accumulator": self.facts.accumulator or None,
            "generation": self.facts.generation or None,
            "alignment": self.facts.alignment,
            "library": self.facts.library or None,
            "evidence": rule,
            "witness": f"{self.measured.kind}: {self.measured.text}" if self.measured else None,
            "op": self.op or None,
            "module": self.module or None,
            "shapes": [_sizes(shape) for shape in self.shapes] or None,
        }


def _sizes(shape: Any) -> Any:
    """Sizes, or lists of them; None for anything else, which a damaged trace may hold."""
    if isinstance(shape, list):
        return [_sizes(size) for size in shape]
    return shape if type(shape) is int else None


@dataclass(frozen=True)
class KernelTimes:
    """All kernels of a trace.

    Attributes:
        kernels: Longest first.
        total_us: Time of all kernels; copies and memsets are not kernels.
    """

    kernels: tuple[KernelTime, ...]
    total_us: float

    def fraction(self, *verdicts: str, measured: bool = False) -> float:
        """Share of kernel time with one of these verdicts.

        Args:
            verdicts: Such as ``"tensor_core"``.
            measured: Let counters and rates overrule the names.
        """
        if not self.total_us:
            return 0.0
        found = sum(
            k.time_us
            for k in self.kernels
            if (k.measured_verdict if measured else k.facts.verdict) in verdicts
        )
        return found / self.total_us

    def native_fraction(self, generations: tuple[str, ...]) -> float:
        """Share of kernel time in Tensor Core kernels whose names give one of these generations."""
        return self._generation_fraction(lambda given: given in generations)

    def older_fraction(self, generations: tuple[str, ...]) -> float:
        """Share of kernel time in Tensor Core kernels whose names give another generation."""
        return self._generation_fraction(lambda given: bool(given) and given not in generations)

    @property
    def unnamed_generation_fraction(self) -> float:
        """Share of kernel time in Tensor Core kernels whose names give no generation."""
        return self._generation_fraction(lambda given: not given)

    def _generation_fraction(self, wanted: Callable[[str], bool]) -> float:
        found = sum(
            k.time_us
            for k in self.kernels
            if k.facts.verdict == "tensor_core" and wanted(k.facts.generation)
        )
        return found / self.total_us if self.total_us else 0.0
