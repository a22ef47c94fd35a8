"""The profile of a trace: its kernels, judged operations and findings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mpdiag.display.wording import percent
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores import kernel_evidence, summary
from mpdiag.tensorcores.causes import JudgedOperation, Worth
from mpdiag.tensorcores.inductor_code import Fused
from mpdiag.tensorcores.kernel_evidence import KernelEvidence
from mpdiag.tensorcores.kernels.classification import VERDICTS, KernelFacts
from mpdiag.tensorcores.kernels.rules import TABLE_VERSION, KernelVerdict
from mpdiag.tensorcores.timeline.sweep import COLLECTIVE, Timeline, kind_of

SCHEMA_VERSION = 1
MOSTLY = 0.5
"""Share of kernel time from which communication is what a trace is about."""


@dataclass(frozen=True)
class Profile:
    """What ran on Tensor Cores, what did not, and why.

    Attributes:
        source, path: The program that wrote the trace, and the file.
        device: The GPU that took most of the time; None where the trace does not name it.
        kernel_times: Every kernel with its time.
        operations: Judged; those with the most to gain first.
        worth: What fixing each cause would gain.
        linked_fraction, graph_fraction: Shares of kernel time that were linked to an operation,
            and that were replayed from CUDA graphs.
        native_generation_fraction: Share of kernel time in Tensor Core kernels whose names say that
            they were written for this device's generation; None where the device is not known.
        tensor_active: Sampled share of time that the Tensor pipe was active; None if not sampled.
        findings: As documents: severity, code, message, evidence, fix.
        timeline: Steps and idle time; None where the trace does not say when its kernels ran.
        rank, world_size: The rank that recorded it, and of how many; None where it does not say.
        generated: What the trace says of not having been measured; "" for any other.
    """

    source: str
    path: str
    device: DeviceFacts | None
    kernel_times: "KernelTimes"
    operations: tuple[JudgedOperation, ...]
    worth: tuple[Worth, ...]
    linked_fraction: float
    graph_fraction: float
    native_generation_fraction: float | None
    tensor_active: float | None
    findings: tuple[dict[str, Any], ...]
    timeline: Timeline | None = None
    generated: str = ""
    rank: int | None = None
    world_size: int | None = None

    @property
    def eligibility(self) -> summary.Eligibility:
        """Kernel time by whether its operation could use Tensor Cores, and did."""
        return summary.sum_eligibility(self.operations, self.kernel_time_us)

    @property
    def cause_groups(self) -> list[summary.CauseGroup]:
        """The causes that have a fix, each with one bound for all its operations."""
        return summary.cause_groups(
            self.operations, self.worth, self.kernel_time_us, run_us=self.run_us, amd=self.is_amd
        )

    @property
    def is_amd(self) -> bool:
        """Whether the GPU is AMD's, by its name or by its kernels."""
        return runs_on_amd(self.device, self.kernel_times)

    @property
    def run_us(self) -> float | None:
        """The recorded time in microseconds; None where the trace does not say when kernels ran.

        Not less than the kernels' time, of which several may run at once.
        """
        if self.timeline is None:
            return None
        return max(self.timeline.whole.wall_us, self.kernel_time_us)

    @property
    def sentences(self) -> list[str]:
        """What was eligible, and where the time went, as far as the trace tells."""
        found = summary.summary_sentences(self.eligibility, self.timeline)
        return [summary.in_words_of(words, amd=self.is_amd) for words in found]

    @property
    def kernels(self) -> "tuple[KernelTime, ...]":
        """All kernels, longest first."""
        return self.kernel_times.kernels

    @property
    def kernel_time_us(self) -> float:
        """Time of all kernels together."""
        return self.kernel_times.total_us

    def fraction(self, *verdicts: str, measured: bool = False) -> float:
        """Share of kernel time with one of these verdicts; see ``KernelTimes.fraction``."""
        return self.kernel_times.fraction(*verdicts, measured=measured)

    def charged_fraction(self, verdict: Literal["tensor_core", "cuda_core"]) -> float:
        """Share of kernel time with this verdict, including helper kernels of its operations."""
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
        """The shares of kernel time, in one sentence; of what was measured where names say less."""
        measured = any(k.measured_verdict != k.facts.verdict for k in self.kernels)
        tensor = self.fraction("tensor_core", measured=measured)
        shares = [
            (tensor, "of kernel time ran on Tensor Cores"),
            (self.fraction("cuda_core", measured=measured), "is matrix work on CUDA cores"),
            (self.fraction("unknown", measured=measured), "is unknown"),
        ]
        parts = [f"{percent(share, 1)} {words}" for share, words in shares if share > 0]
        if not tensor:
            parts.insert(0, "no kernel is known to have run on Tensor Cores")
        collective = self.kernel_times.collective_fraction
        if collective >= MOSTLY:
            parts.insert(
                0, f"{percent(collective, 1)} of kernel time is communication (NCCL, RCCL)"
            )
        if measured:
            by_name = self.fraction("tensor_core"), self.fraction("unknown")
            on_cores, unknown = (percent(share, 1) for share in by_name)
            parts.append(f"as measured (by name: {on_cores} on Tensor Cores, {unknown} unknown)")
        return summary.in_words_of(", ".join(parts), amd=self.is_amd)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag profile --json``."""
        device = self.device.to_json() if self.device else {}
        measured = {f"{v}_fraction_witnessed": self.fraction(v, measured=True) for v in VERDICTS}
        cuda_cores = measured.pop("cuda_core_fraction_witnessed")
        measured["matrix_cuda_core_fraction_witnessed"] = cuda_cores
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "trace": self.path,
            "generated": self.generated or None,
            "rank": self.rank,
            "world_size": self.world_size,
            "kernel_table": TABLE_VERSION,
            "verdict": self.verdict,
            "device": device,
            "kernel_time_us": self.kernel_time_us,
            "tensor_core_fraction": self.fraction("tensor_core"),
            "matrix_cuda_core_fraction": self.fraction("cuda_core"),
            **{f"{v}_fraction": self.fraction(v) for v in ("helper", "layout", "other", "unknown")},
            "native_generation_fraction": self.native_generation_fraction,
            "unnamed_generation_fraction": self.kernel_times.generation_fraction("".__eq__),
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
            "summary": self.sentences,
            "causes": [group.to_json() for group in self.cause_groups],
            "eligibility": self.eligibility.to_json(),
            "timeline": self.timeline.to_json() if self.timeline else None,
        }


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel for one operation and module.

    Attributes:
        name: As the trace has it.
        facts: What its name says.
        calls, time_us: Number of runs, and their time in all.
        op, module, shapes: The operation that launched it; empty where it could not be linked.
        measured: What counters or rates say of it; None where they say nothing.
        fused: What inductor fused into it; None where its code was not read.
    """

    name: str
    facts: KernelFacts
    calls: int
    time_us: float
    op: str = ""
    module: str = ""
    shapes: tuple[Any, ...] = ()
    measured: KernelEvidence | None = None
    fused: Fused | None = None

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
            "fused": self.fused.to_json() if self.fused else None,
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

    @property
    def collective_fraction(self) -> float:
        """Share of kernel time in collectives."""
        found = sum(k.time_us for k in self.kernels if kind_of(k.name) == COLLECTIVE)
        return found / self.total_us if self.total_us else 0.0

    def generation_fraction(self, wanted: Callable[[str], bool]) -> float:
        """Share of kernel time in Tensor Core kernels of some generations; "" is one not named."""
        found = sum(
            k.time_us
            for k in self.kernels
            if k.facts.verdict == "tensor_core" and wanted(k.facts.generation)
        )
        return found / self.total_us if self.total_us else 0.0


def runs_on_amd(device: DeviceFacts | None, times: KernelTimes) -> bool:
    """Whether a GPU is AMD's, by its name or by the kernels that ran on it."""
    known = device or DeviceFacts(name="")
    return summary.is_amds(
        known.name, known.generation, (k.facts.generation for k in times.kernels)
    )
