"""What a trace was found to say: the profile, and its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.hardware.kernel_rules import TABLE_VERSION
from mpdiag.hardware.kernels import VERDICTS
from mpdiag.tensorcores import kernel_evidence

if TYPE_CHECKING:
    from mpdiag.hardware.devices import DeviceFacts
    from mpdiag.hardware.kernels import KernelFacts, KernelVerdict
    from mpdiag.tensorcores.causes import JudgedOperation, Worth
    from mpdiag.tensorcores.kernel_evidence import KernelEvidence

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one place, all its runs together.

    Attributes:
        name: As the trace has it.
        facts: What its name says.
        calls, time_us: How often, how long.
        op, module, shapes: Where it belongs; empty where it could not be linked.
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
        """The verdict with the strongest evidence there is."""
        return kernel_evidence.measured_verdict(self.facts, self.measured)

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
            "measured_verdict": self.measured_verdict,
            "instruction": self.facts.instruction or None,
            "dtype": self.facts.dtype or None,
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
    """Sizes, or lists of them; None in place of what a damaged trace has there."""
    if isinstance(shape, list):
        return [_sizes(size) for size in shape]
    return shape if type(shape) is int else None


@dataclass(frozen=True)
class Profile:
    """The answer.

    Attributes:
        source, path: What wrote the trace, and where it lies.
        device: The GPU that most of the time was spent on; None where the trace does not say.
        kernel_time_us: Of all kernels; copies and memsets are none.
        kernels: By time.
        operations: Judged, those worth most first.
        worth: What mending each cause is worth.
        linked_fraction, graph_fraction: Shares of kernel time.
        native_generation_fraction: Share of kernel time in Tensor Core kernels written for this
            device's generation; None where the device is not known.
        tensor_active: Sampled share of time that the Tensor pipe was active; None if not sampled.
        problems: What could not be read.
        has_operations: Whether the trace holds operations of the host at all.
        findings: As documents: severity, code, message, evidence, fix.
    """

    source: str
    path: str
    device: DeviceFacts | None
    kernel_time_us: float
    kernels: tuple[KernelTime, ...]
    operations: tuple[JudgedOperation, ...]
    worth: tuple[Worth, ...]
    linked_fraction: float
    graph_fraction: float
    native_generation_fraction: float | None
    tensor_active: float | None
    problems: tuple[str, ...]
    has_operations: bool
    findings: tuple[dict[str, Any], ...] = ()

    def fraction(self, *verdicts: str, measured: bool = False) -> float:
        """Share of kernel time with one of these verdicts, by name or as measured."""
        if not self.kernel_time_us:
            return 0.0
        found = sum(
            k.time_us
            for k in self.kernels
            if (k.measured_verdict if measured else k.facts.verdict) in verdicts
        )
        return found / self.kernel_time_us

    def charged_fraction(self, verdict: Literal["tensor_core", "cuda_core"]) -> float:
        """Share of kernel time with this verdict, its operations' helpers charged to it."""
        charged = 0.0
        for judged in self.operations:
            o = judged.operation
            if max(o.tensor_core_us, o.cuda_core_us) > 0:
                on_tensor_cores = o.tensor_core_us >= o.cuda_core_us
                charged += o.helper_us * (on_tensor_cores == (verdict == "tensor_core"))
        whole = self.kernel_time_us
        return self.fraction(verdict) + (charged / whole if whole else 0.0)

    @property
    def verdict(self) -> str:
        """One sentence."""
        shares = [(self.fraction("tensor_core"), "of kernel time ran on Tensor Cores")]
        shares += [
            (self.fraction("cuda_core"), "is matrix work on CUDA cores"),
            (self.fraction("unknown"), "is unknown"),
        ]
        parts = [f"{100 * share:.1f} % {words}" for share, words in shares if share > 0]
        if not self.fraction("tensor_core"):
            parts.insert(0, "no kernel is known to have run on Tensor Cores")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag profile --json``."""
        device = self.device.to_json() if self.device else {}
        measured = {f"{v}_fraction_witnessed": self.fraction(v, measured=True) for v in VERDICTS}
        measured["matrix_cuda_core_fraction_witnessed"] = measured.pop(
            "cuda_core_fraction_witnessed"
        )
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "trace": self.path,
            "kernel_table": TABLE_VERSION,
            "verdict": self.verdict,
            "device": device,
            "kernel_time_us": self.kernel_time_us,
            "tensor_core_fraction": self.fraction("tensor_core"),
            "matrix_cuda_core_fraction": self.fraction("cuda_core"),
            "helper_fraction": self.fraction("helper"),
            "layout_fraction": self.fraction("layout"),
            "other_fraction": self.fraction("other"),
            "unknown_fraction": self.fraction("unknown"),
            "native_generation_fraction": self.native_generation_fraction,
            "linked_fraction": self.linked_fraction,
            "graph_fraction": self.graph_fraction,
            "tensor_active_sampled": self.tensor_active,
            **measured,
            "tensor_core_fraction_with_helpers": self.charged_fraction("tensor_core"),
            "matrix_cuda_core_fraction_with_helpers": self.charged_fraction("cuda_core"),
            "kernels": [k.to_json() for k in self.kernels],
            "operations": [o.to_json() for o in self.operations],
            "worth": [w.to_json() for w in self.worth],
            "findings": list(self.findings),
        }
