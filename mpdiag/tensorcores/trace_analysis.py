"""From a trace to a verdict: which time went to Tensor Cores, and why the rest did not."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedTrace
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.kernels import classify
from mpdiag.tensorcores import kernel_evidence
from mpdiag.tensorcores.causes import judge, worth
from mpdiag.tensorcores.kernel_linking import link
from mpdiag.tensorcores.profile_findings import find
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.trace_profile import KernelTime, Profile
from mpdiag.tensorcores.work.traced_operation import OperationTime, matrix_work

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from mpdiag.hardware.kernels import KernelFacts
    from mpdiag.tensorcores.events import Kernel, TraceReader
    from mpdiag.tensorcores.kernel_evidence import KernelEvidence
    from mpdiag.tensorcores.kernel_linking import KernelOrigin, Linked, Signature
    from mpdiag.tensorcores.work.products import MatrixWork

STDIN = "-"
"""Of a path: standard input."""
# Generations whose instructions a device of a major capability runs at its own full rate.
_NATIVE = {7: ("sm70", "sm72"), 8: ("sm80", "sm86", "sm87", "sm89"), 9: ("sm90",)}
_NATIVE |= {10: ("sm100", "sm101", "sm103"), 12: ("sm80", "sm89", "sm120", "sm121")}
_AMD = {(9, 0): ("gfx90a", "gfx908"), (9, 4): ("gfx942", "gfx940", "gfx941"), (9, 5): ("gfx950",)}


def profile_trace(path: str | os.PathLike[str]) -> Profile:
    """Read a trace of torch.profiler, nsys, ncu or nvprof and judge it.

    Args:
        path: The file; ``-`` for standard input, and a pipe is read to its end first.

    Raises:
        InputError: If there is none, or it cannot be read, or it holds no kernel.
    """
    with _standing(path) as file:
        trace = read(file)
        linked = link(trace)
        if linked.kernels:
            return _judge(trace, linked, str(path))
    if trace.problems:
        message = f"{path} holds no GPU kernel as far as it can be read: {trace.problems[0]}"
    else:
        message = (
            f"{path} holds no GPU kernels: record with ProfilerActivity.CUDA, "
            "or use mpdiag profile -- script.py on a CPU"
        )
    raise DamagedTrace(message)


def is_trace(path: Path) -> bool:
    """Whether a local path can be a trace's and no run folder: a file, a pipe or standard input."""
    return path.is_file() or _flows(path)


def _flows(path: Path) -> bool:
    return str(path) == STDIN or path.is_fifo()


@contextmanager
def _standing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The trace as a file that can be read twice: a pipe's bytes are kept meanwhile."""
    place = Path(path)
    if not _flows(place):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="mpdiag-") as folder:
        file = Path(folder) / ("stdin" if str(place) == STDIN else place.name)
        with ExitStack() as stack:
            source = (
                sys.stdin.buffer if str(place) == STDIN else stack.enter_context(place.open("rb"))
            )
            shutil.copyfileobj(source, stack.enter_context(file.open("wb")))
        yield file


def _judge(trace: TraceReader, linked: Linked, path: str) -> Profile:
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
    profile = Profile(
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
    return replace(profile, findings=find(profile))


def _device(trace: TraceReader, linked: Linked) -> DeviceFacts | None:
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
    measured: list[Kernel], device: DeviceFacts | None, rate: KernelEvidence | None
) -> KernelEvidence | None:
    """The strongest measurement of a kernel; None where there is none."""
    if measured:
        counted = kernel_evidence.by_counters(measured) or kernel_evidence.by_measured_rate(
            measured, device
        )
        if counted:
            return counted
    return rate


def _kernel(
    name: str, place: KernelOrigin, calls: int, time_us: float, evidence: KernelEvidence | None
) -> KernelTime:
    s = place.signature
    facts = classify(name)
    if (
        evidence is not None
        and evidence.kind == "rate"
        and facts.verdict in ("other", "helper", "layout")
    ):
        evidence = None  # the rate speaks of the product, not of what stands beside it
    return KernelTime(
        name,
        facts,
        calls,
        time_us,
        s.name if s else "",
        place.module,
        tuple(s.dims) if s else (),
        evidence,
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
        self.places: set[KernelOrigin] = set()
        self.alignments: list[int] = []
        self.generations: list[str] = []
        self.kernels: dict[str, float] = defaultdict(float)
        self.runs = 0

    def take(self, name: str, facts: KernelFacts, spent: float) -> None:
        self.times[facts.verdict] += spent
        if facts.verdict in ("tensor_core", "cuda_core", "unknown"):
            self.kernels[name] += spent
        if facts.verdict in ("tensor_core", "cuda_core"):
            if facts.dtype:
                self.dtypes[facts.dtype] += spent
            if facts.alignment is not None:
                self.alignments.append(facts.alignment)
            if facts.verdict == "tensor_core" and facts.generation:
                self.generations.append(facts.generation)


def _operations(
    linked: Linked, works: dict[Signature | None, MatrixWork | None], device: DeviceFacts | None
) -> tuple[list[OperationTime], dict[KernelOrigin, KernelEvidence | None]]:
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
        found.take(name, facts, runs.time_us)
        found.places.add(place)
        found.runs += runs.calls
    peaks = device.peaks if device else None
    operations: list[OperationTime] = []
    heard: dict[KernelOrigin, KernelEvidence | None] = {}
    for (op, module, phase, signature), found in sums.items():
        calls = sum(linked.calls.get(place, 0) for place in found.places) or found.runs
        operation = _operation(op, module, phase, works[signature], calls, found)
        operations.append(operation)
        evidence = kernel_evidence.by_rate(operation, peaks)
        if evidence:
            heard.update(dict.fromkeys(found.places, evidence))
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
        kernel=max(found.kernels, key=lambda k: found.kernels[k]) if found.kernels else None,
    )


def _age(generation: str) -> tuple[int, str]:
    digits = "".join(c for c in generation if c.isdigit())
    return int(digits or 0), generation
