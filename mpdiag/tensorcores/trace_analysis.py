"""From a trace to a profile: how much kernel time went to Tensor Cores, and why the rest did not."""

import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpdiag.display.wording import counted
from mpdiag.errors import DamagedTrace, InputError, UsageError
from mpdiag.files.recognition import run_instead
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores import kernel_evidence
from mpdiag.tensorcores.causes import judge, worth
from mpdiag.tensorcores.collected import Collected, KernelSum, Signature
from mpdiag.tensorcores.events import Kernel, TraceReader
from mpdiag.tensorcores.inductor_code import Fused, read_fused
from mpdiag.tensorcores.kernel_evidence import KernelEvidence, read_code
from mpdiag.tensorcores.kernel_linking import KernelOrigin, Linked, link
from mpdiag.tensorcores.kernels.classification import KernelFacts, classify, native_generations
from mpdiag.tensorcores.profile_comparison import ProfileComparison, compare_profiles
from mpdiag.tensorcores.profile_findings import profile_findings
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.summary import in_words_of
from mpdiag.tensorcores.timeline.ranks import RankComparison, compare_ranks
from mpdiag.tensorcores.timeline.sweep import Timeline, activities, make_timeline
from mpdiag.tensorcores.trace_profile import KernelTime, KernelTimes, Profile, runs_on_amd
from mpdiag.tensorcores.work.products import MatrixWork
from mpdiag.tensorcores.work.traced_operation import OperationTime, matrix_work

STDIN = "-"
"""The path that stands for standard input."""
TRACES = (".json", ".json.gz", ".sqlite")
"""How the names of traces end that a folder is searched for."""
NOT_TRACES = (
    *("meta.json", "plan.json", "profile.json", "sensitivity.json", "search.json", "margins.json"),
    *("comparison.json", "precision.json", "probe.json", "training.jsonl", "settings.json"),
)
"""Files with the endings of traces that are ours."""


def profile_trace(
    path: str | os.PathLike[str], *, triton_code: str | os.PathLike[str] | None = None
) -> Profile:
    """Read a trace of a profiler, of any kind that ``readers.recognition`` knows, and judge it.

    Args:
        path: The file; ``-`` for standard input. A pipe is read to its end first.
        triton_code: Triton's cache or tritonparse's log: its code judges the kernels it holds;
            inductor's cache or a log of ``TORCH_TRACE``, which names what each kernel fused.

    Raises:
        InputError: If there is no such file, it cannot be read, or it holds no kernel.
    """
    fused: dict[str, Fused] = {}
    codes: dict[str, KernelEvidence] = {}
    if triton_code is not None:
        fused = read_fused(Path(triton_code))
        codes = read_code(Path(triton_code), needed=not fused)
    with _seekable_file(path) as file:
        trace = read(file)
        collected = Collected()
        try:
            collected.take_all(trace)
            linked = link(collected)
            if linked.kernels:
                timeline = _timeline(collected, linked)
                return _profile(trace, linked, str(path), codes, fused, timeline)
        finally:
            collected.close()
    if trace.problems:
        message = f"{path} holds no GPU kernel in its readable part: {trace.problems[0]}"
    else:
        message = (
            f"{path} holds no GPU kernels: record with ProfilerActivity.CUDA, "
            "or use mpdiag profile -- script.py on a CPU"
        )
    raise DamagedTrace(message)


def compare_traces(before: str | os.PathLike[str], now: object) -> ProfileComparison:
    """Read an earlier trace and compare a profile with it.

    Args:
        before: The trace from before the change.
        now: The profile from after it.

    Raises:
        InputError: If the earlier trace cannot be read.
        UsageError: If ``now`` is not the profile of a GPU's trace.
    """
    if not isinstance(now, Profile):
        raise UsageError("only traces of a GPU can be compared: --against needs two of them")
    return compare_profiles(profile_trace(before), now)


def holds_traces(folder: Path) -> bool:
    """Whether a local path is a folder of traces rather than a run."""
    if not folder.is_dir() or (folder / "meta.json").exists():
        return False
    return len(_traces(folder)) > 1


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, by name.

    Raises:
        InputError: If the folder is a run.
        UsageError: If there are fewer than two.
    """
    if (folder / "meta.json").is_file():
        raise InputError(run_instead(folder, "trace"))
    found = _traces(folder)
    if len(found) < 2:
        message = f"{folder} holds {counted(len(found), 'trace')}: one for each rank is needed"
        raise UsageError(message)
    return found


def _traces(folder: Path) -> list[Path]:
    found = (p for p in folder.iterdir() if p.name.endswith(TRACES) and p.name not in NOT_TRACES)
    return sorted(p for p in found if p.is_file())


def profile_ranks(paths: Sequence[Path]) -> RankComparison:
    """Read the traces of several ranks and compare one step of them.

    Raises:
        InputError: If a trace cannot be read.
        UsageError: If they are not of one run.
    """
    return compare_ranks([profile_trace(path) for path in paths])


def is_trace(path: Path) -> bool:
    """Whether a local path can be a trace rather than a run folder: a file, a pipe or ``-``."""
    return path.is_file() or _is_stream(path)


def _is_stream(path: Path) -> bool:
    return str(path) == STDIN or path.is_fifo()


@contextmanager
def _seekable_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The trace as a file that can be read twice: a stream is copied to disk for a while."""
    place = Path(path)
    if not _is_stream(place):
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


def _timeline(trace: Collected, linked: Linked) -> Timeline | None:
    """When the device that took most of the kernel time worked."""
    device = max(linked.devices, key=lambda d: linked.devices[d])
    works = activities(trace, device)
    return make_timeline(works, trace.spans, spans_left_out=trace.left_out)


def _profile(
    trace: TraceReader,
    linked: Linked,
    path: str,
    codes: Mapping[str, KernelEvidence],
    fused: Mapping[str, Fused],
    timeline: Timeline | None,
) -> Profile:
    device = _device(trace, linked)
    works = _matrix_works(linked)
    operations, rates = _operations(linked, works, device)
    times = _kernel_times(linked, device, rates, codes, fused)
    amd = runs_on_amd(device, times)
    judged = [
        replace(j, fix=in_words_of(j.fix, amd=amd))
        for j in judge(
            operations, device or _assumed_device(linked), total_us=linked.total_us, amd=amd
        )
    ]
    native: tuple[str, ...] = ()  # kernels of these generations use the device's own instructions
    if device is not None and device.capability is not None and times.total_us:
        native = native_generations(device.capability, amd=runs_on_amd(device, times))
    return Profile(
        source=trace.source,
        path=path,
        device=device,
        kernel_times=times,
        operations=tuple(judged),
        worth=tuple(worth(judged, linked.total_us)),
        linked_fraction=linked.linked_fraction,
        graph_fraction=linked.graph_fraction,
        native_generation_fraction=times.generation_fraction(native.__contains__)
        if native
        else None,
        tensor_active=trace.tensor_active,
        findings=profile_findings(
            trace, times, device, linked=linked, native=native, judged=judged, timeline=timeline
        ),
        timeline=timeline,
        rank=trace.rank,
        world_size=trace.world_size,
        generated=trace.generated,
    )


def _device(trace: TraceReader, linked: Linked) -> DeviceFacts | None:
    """The device that took most of the kernel time."""
    for index in sorted(linked.devices, key=lambda d: -linked.devices[d]):
        if isinstance(index, int) and index in trace.devices:
            return trace.devices[index]
    return next(iter(trace.devices.values()), None)


def _assumed_device(linked: Linked) -> DeviceFacts | None:
    """What must be true of a device that the trace does not name: it runs the newest kernels seen.

    That is enough to know whether it has TF32. Without a name there are no peak rates.
    """
    newest = max(
        (_generation_order(classify(name).generation) for name, _ in linked.kernels),
        default=(0, ""),
    )
    if not newest[1].startswith("sm"):
        return None
    return DeviceFacts(name="", capability=divmod(newest[0], 10))


def _kernel_times(
    linked: Linked,
    device: DeviceFacts | None,
    rates: Mapping[KernelOrigin, KernelEvidence],
    codes: Mapping[str, KernelEvidence],
    fused: Mapping[str, Fused],
) -> KernelTimes:
    kernels = [
        _kernel_time(
            name,
            origin,
            runs,
            _evidence(runs.measured, device, codes.get(plain) or rates.get(origin)),
            fused.get(plain),
        )
        for (name, origin), runs in linked.kernels.items()
        for plain in (name.removesuffix(".kd"),)  # which some profilers add to AMD's names
    ]
    kernels.sort(key=lambda k: -k.time_us)
    return KernelTimes(tuple(kernels), linked.total_us)


def _evidence(
    measured: list[Kernel], device: DeviceFacts | None, otherwise: KernelEvidence | None
) -> KernelEvidence | None:
    """The strongest evidence besides the name: counters, else the measured rate, else another."""
    counted = None
    if measured:
        capability = device.capability if device else None
        counted = kernel_evidence.by_counters(measured, capability)
        counted = counted or kernel_evidence.by_measured_rate(measured, device)
    return counted or otherwise


def _kernel_time(
    name: str,
    origin: KernelOrigin,
    runs: KernelSum,
    evidence: KernelEvidence | None,
    fused: Fused | None,
) -> KernelTime:
    facts = classify(name)
    beside_the_product = facts.verdict in ("other", "helper", "layout")
    if evidence is not None and evidence.kind == "rate" and beside_the_product:
        evidence = None  # the rate is that of the product, not of kernels that run beside it
    signature = origin.signature
    return KernelTime(
        name=name,
        facts=facts,
        calls=runs.calls,
        time_us=runs.time_us,
        op=signature.name if signature else "",
        module=origin.module,
        shapes=tuple(signature.dims) if signature else (),
        measured=evidence,
        fused=fused,
    )


def _matrix_works(linked: Linked) -> dict[Signature | None, MatrixWork | None]:
    """The matrix work of each operation that launched a kernel."""
    works: dict[Signature | None, MatrixWork | None] = {None: None}
    for _, origin in linked.kernels:
        s = origin.signature
        if s is not None and s not in works:
            works[s] = matrix_work(s.name, s.dims, s.types, s.strides, s.concrete)
    return works


class _OperationSum:
    """Times of an operation while its kernels are added up."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)
        self.dtypes: dict[str, float] = defaultdict(float)
        self.origins: set[KernelOrigin] = set()
        self.alignments: list[int] = []
        self.kernels: dict[str, float] = defaultdict(float)
        self.runs = 0

    def add(self, name: str, facts: KernelFacts, spent: float) -> None:
        self.times[facts.verdict] += spent
        if facts.verdict in ("tensor_core", "cuda_core", "unknown"):
            self.kernels[name] += spent
        if facts.verdict in ("tensor_core", "cuda_core"):
            if facts.dtype:
                self.dtypes[facts.dtype] += spent
            if facts.alignment is not None:
                self.alignments.append(facts.alignment)


def _operations(
    linked: Linked, works: dict[Signature | None, MatrixWork | None], device: DeviceFacts | None
) -> tuple[list[OperationTime], dict[KernelOrigin, KernelEvidence]]:
    """Kernels added up by operation, and what the rate of each product proves."""
    sums: dict[tuple[Any, ...], _OperationSum] = defaultdict(_OperationSum)
    for (name, origin), runs in linked.kernels.items():
        facts = classify(name)
        signature = origin.signature
        work = works[signature]
        key: tuple[Any, ...]
        if signature is not None:
            # Without matrix work the shapes do not matter.
            key = (signature.name, origin.module, origin.phase, signature if work else None)
        elif facts.verdict in ("tensor_core", "cuda_core"):
            key = (f"(not linked) {name[:80]}", "", "", None)
        else:
            continue
        found = sums[key]
        found.add(name, facts, runs.time_us)
        found.origins.add(origin)
        found.runs += runs.calls
    peaks = device.peaks_at_most if device else None
    operations: list[OperationTime] = []
    rates: dict[KernelOrigin, KernelEvidence] = {}
    for (op, module, phase, signature), found in sums.items():
        calls = sum(linked.calls.get(origin, 0) for origin in found.origins) or found.runs
        operation = _operation(op, module, phase, works[signature], calls, found)
        operations.append(operation)
        evidence = kernel_evidence.by_rate(operation, peaks)
        if evidence:
            rates.update(dict.fromkeys(found.origins, evidence))
    return operations, rates


def _operation(
    op: str, module: str, phase: Any, work: MatrixWork | None, calls: int, found: _OperationSum
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
        phase=phase,
        kernel=max(found.kernels, key=lambda k: found.kernels[k]) if found.kernels else None,
    )


def _generation_order(generation: str) -> tuple[int, str]:
    """A key that sorts ``sm75`` before ``sm80`` before ``sm100``."""
    digits = "".join(c for c in generation if c.isdigit())
    return int(digits or 0), generation
