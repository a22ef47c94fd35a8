"""From a trace to a verdict: which time went to Tensor Cores, and why the rest did not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores import witnesses
from mpdiag.tensorcores.causes import judge, worth
from mpdiag.tensorcores.devices import DeviceFacts
from mpdiag.tensorcores.kernels import TABLE_VERSION, VERDICTS, classify
from mpdiag.tensorcores.linking import link
from mpdiag.tensorcores.profile_findings import find
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.work import OperationTime, matrix_work

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from mpdiag.tensorcores.causes import JudgedOperation, Worth
    from mpdiag.tensorcores.events import Kernel, Trace
    from mpdiag.tensorcores.kernels import KernelFacts, Verdict
    from mpdiag.tensorcores.linking import Linked, Place, Signature
    from mpdiag.tensorcores.products import MatrixWork
    from mpdiag.tensorcores.witnesses import Witness

SCHEMA_VERSION = 1
# Generations whose instructions a device of a major capability runs at its own full rate.
_NATIVE = {7: ("sm70", "sm72"), 8: ("sm80", "sm86", "sm87", "sm89"), 9: ("sm90",)}
_NATIVE |= {10: ("sm100", "sm101", "sm103"), 12: ("sm80", "sm89", "sm120", "sm121")}
_AMD = {(9, 0): ("gfx90a", "gfx908"), (9, 4): ("gfx942", "gfx940", "gfx941"), (9, 5): ("gfx950",)}


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one place, all its runs together.

    Attributes:
        name: As the trace has it.
        facts: What its name says.
        calls, time_us: How often, how long.
        op, module, shapes: Where it belongs; empty where it could not be linked.
        witness: What else speaks of it; None where nothing does.
    """

    name: str
    facts: KernelFacts
    calls: int
    time_us: float
    op: str = ""
    module: str = ""
    shapes: tuple[Any, ...] = ()
    witness: Witness | None = None

    @property
    def verdict_witnessed(self) -> Verdict:
        """The verdict with the strongest evidence there is."""
        return witnesses.witnessed(self.facts, self.witness)

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
            "verdict_witnessed": self.verdict_witnessed,
            "instruction": self.facts.instruction or None,
            "dtype": self.facts.dtype or None,
            "accumulator": self.facts.accumulator or None,
            "generation": self.facts.generation or None,
            "alignment": self.facts.alignment,
            "library": self.facts.library or None,
            "evidence": rule,
            "witness": f"{self.witness.kind}: {self.witness.text}" if self.witness else None,
            "op": self.op or None,
            "module": self.module or None,
            "shapes": list(self.shapes) or None,
        }


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
        linked: Times of what was linked, of graphs, of all that has a launch.
        linked_fraction, graph_fraction: Shares of kernel time.
        native_generation_fraction: Share of kernel time in Tensor Core kernels written for this
            device's generation; None where the device is not known.
        tensor_active: Sampled share of time that the Tensor pipe was active; None if not sampled.
        problems: What could not be read.
        has_operations: Whether the trace holds operations of the host at all.
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

    def fraction(self, *verdicts: str, witnessed: bool = False) -> float:
        """Share of kernel time with one of these verdicts, by name or as witnessed."""
        if not self.kernel_time_us:
            return 0.0
        found = sum(
            k.time_us
            for k in self.kernels
            if (k.verdict_witnessed if witnessed else k.facts.verdict) in verdicts
        )
        return found / self.kernel_time_us

    def charged_fraction(self, verdict: str) -> float:
        """Share of kernel time with this verdict, its operations' helpers charged to it."""
        charged = 0.0
        for judged in self.operations:
            o = judged.operation
            matrix = max(o.tensor_core_us, o.cuda_core_us)
            own = o.tensor_core_us if verdict == "tensor_core" else o.cuda_core_us
            charged += o.helper_us if matrix > 0 and own == matrix else 0.0
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

    @property
    def findings(self) -> tuple[dict[str, Any], ...]:
        """As documents: severity, code, message, evidence, fix."""
        return find(self)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag profile --json``."""
        device = self.device.to_json() if self.device else {}
        witnessed = {f"{v}_fraction_witnessed": self.fraction(v, witnessed=True) for v in VERDICTS}
        witnessed["matrix_cuda_core_fraction_witnessed"] = witnessed.pop(
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
            **witnessed,
            "tensor_core_fraction_with_helpers": self.charged_fraction("tensor_core"),
            "matrix_cuda_core_fraction_with_helpers": self.charged_fraction("cuda_core"),
            "kernels": [k.to_json() for k in self.kernels],
            "operations": [o.to_json() for o in self.operations],
            "worth": [w.to_json() for w in self.worth],
            "findings": list(self.findings),
        }


def profile_trace(path: str | os.PathLike[str]) -> Profile:
    """Read a trace of torch.profiler, nsys, ncu or nvprof and judge it.

    Raises:
        InputError: If there is none, or it cannot be read, or it holds no kernel.
    """
    trace = read(path)
    linked = link(trace)
    if not linked.kernels:
        message = (
            f"{path} holds no GPU kernels: record with ProfilerActivity.CUDA, "
            "or use mpdiag profile -- script.py on a CPU"
        )
        raise DamagedTrace(message)
    return _judge(trace, linked, str(path))


def _judge(trace: Trace, linked: Linked, path: str) -> Profile:
    device = _device(trace, linked)
    works: dict[Signature | None, MatrixWork | None] = {None: None}
    for _, place in linked.kernels:
        if place.signature not in works and place.signature is not None:
            s = place.signature
            works[s] = matrix_work(s.name, s.dims, s.types, s.strides, s.concrete)
    operations, heard = _operations(linked, works, device)
    judged = judge(operations, device or _at_least(linked), total_us=linked.total_us)
    kernels = [
        _kernel(
            name, place, runs.calls, runs.time_us, _hear(runs.measured, device, heard.get(place))
        )
        for (name, place), runs in linked.kernels.items()
    ]
    kernels.sort(key=lambda k: -k.time_us)
    return Profile(
        source=trace.source,
        path=path,
        device=device,
        kernel_time_us=linked.total_us,
        kernels=tuple(kernels),
        operations=tuple(judged),
        worth=tuple(worth(judged, linked.total_us)),
        linked_fraction=linked.linked_fraction,
        graph_fraction=linked.graph_us / linked.total_us if linked.total_us else 0.0,
        native_generation_fraction=_native(kernels, device, linked.total_us),
        tensor_active=trace.tensor_active,
        problems=tuple(trace.problems),
        has_operations=linked.operations > 0,
    )


def _device(trace: Trace, linked: Linked) -> DeviceFacts | None:
    """The device that most kernel time was spent on."""
    for index in sorted(linked.devices, key=lambda d: -linked.devices[d]):
        if isinstance(index, int) and index in trace.devices:
            return trace.devices[index]
    return next(iter(trace.devices.values()), None)


def _at_least(linked: Linked) -> DeviceFacts | None:
    """What must be true of a device that a trace does not name: it runs the newest kernels seen.

    Enough to know that TF32 is to be had; no name, hence no rates.
    """
    newest = max((_age(classify(name).generation) for name, _ in linked.kernels), default=(0, ""))
    if not newest[1].startswith("sm"):
        return None
    return DeviceFacts(name="", capability=divmod(newest[0], 10))


def _hear(
    measured: list[Kernel], device: DeviceFacts | None, rate: Witness | None
) -> Witness | None:
    """The strongest witness."""
    if measured:
        counted = witnesses.by_counters(measured) or witnesses.by_measured_rate(measured, device)
        if counted:
            return counted
    return rate


def _kernel(
    name: str, place: Place, calls: int, time_us: float, witness: Witness | None
) -> KernelTime:
    s = place.signature
    facts = classify(name)
    if (
        witness is not None
        and witness.kind == "rate"
        and facts.verdict in ("other", "helper", "layout")
    ):
        witness = None  # the rate speaks of the product, not of what stands beside it
    return KernelTime(
        name,
        facts,
        calls,
        time_us,
        s.name if s else "",
        place.module,
        tuple(s.dims) if s else (),
        witness,
    )


def _native(
    kernels: Iterable[KernelTime], device: DeviceFacts | None, total: float
) -> float | None:
    if device is None or device.capability is None or not total:
        return None
    major = device.capability[0]
    native: tuple[str, ...] = _NATIVE.get(major, ())
    if device.capability == (7, 5):
        native = ("sm75",)
    amd = any(k.facts.generation.startswith("gfx") for k in kernels)
    if amd:
        native = _AMD.get(device.capability, ())
    if not native:
        return None
    found = sum(
        k.time_us
        for k in kernels
        if k.facts.verdict == "tensor_core" and k.facts.generation in native
    )
    return found / total


# -- operations ------------------------------------------------------------------------------------


class _Sum:
    """Times of an operation while they are added up."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)
        self.dtypes: dict[str, float] = defaultdict(float)
        self.places: set[Place] = set()
        self.alignments: list[int] = []
        self.generations: list[str] = []
        self.runs = 0

    def take(self, facts: KernelFacts, spent: float) -> None:
        self.times[facts.verdict] += spent
        if facts.verdict in ("tensor_core", "cuda_core"):
            if facts.dtype:
                self.dtypes[facts.dtype] += spent
            if facts.alignment is not None:
                self.alignments.append(facts.alignment)
            if facts.verdict == "tensor_core" and facts.generation:
                self.generations.append(facts.generation)


def _operations(
    linked: Linked, works: dict[Signature | None, MatrixWork | None], device: DeviceFacts | None
) -> tuple[list[OperationTime], dict[Place, Witness | None]]:
    """Kernels added up by operation, and what each product's rate says."""
    sums: dict[tuple[Any, ...], _Sum] = defaultdict(_Sum)
    for (name, place), runs in linked.kernels.items():
        facts = classify(name)
        signature = place.signature
        work = works[signature]
        key: tuple[Any, ...]
        if signature is not None:
            # Without matrix work the shapes do not matter.
            key = (signature.name, place.module, place.phase, signature if work else None)
        elif facts.verdict in ("tensor_core", "cuda_core"):
            key = (f"(not linked) {name[:80]}", "", "", None)
        else:
            continue
        found = sums[key]
        found.take(facts, runs.time_us)
        found.places.add(place)
        found.runs += runs.calls
    peaks = device.peaks if device else None
    operations: list[OperationTime] = []
    heard: dict[Place, Witness | None] = {}
    for (op, module, phase, signature), found in sums.items():
        calls = sum(linked.calls.get(place, 0) for place in found.places) or found.runs
        operation = _operation(op, module, phase, works[signature], calls, found)
        operations.append(operation)
        witness = witnesses.by_rate(operation, peaks)
        if witness:
            heard.update(dict.fromkeys(found.places, witness))
    return operations, heard


def _operation(
    op: str, module: str, phase: Any, work: MatrixWork | None, calls: int, found: _Sum
) -> OperationTime:
    dtype = max(found.dtypes, key=lambda d: found.dtypes[d]) if found.dtypes else None
    t = found.times
    return OperationTime(
        op=op,
        module=module,
        work=work,
        dtype=dtype or (work.dtype if work else None),
        calls=calls,
        time_us=sum(t.values()),
        tensor_core_us=t["tensor_core"],
        cuda_core_us=t["cuda_core"],
        helper_us=t["helper"],
        layout_us=t["layout"],
        other_us=t["other"],
        unknown_us=t["unknown"],
        kernel_alignment=min(found.alignments, default=None),
        kernel_generation=min(found.generations, key=_age, default=None),
        phase=phase,
    )


def _age(generation: str) -> tuple[int, str]:
    digits = "".join(c for c in generation if c.isdigit())
    return int(digits or 0), generation
