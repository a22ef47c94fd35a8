"""Findings of a trace: matrix work off Tensor Cores, unknown or old kernels, contradictions, gaps."""

from collections.abc import Iterator, Sequence
from typing import Any

from mpdiag.display.explanations import command_for
from mpdiag.display.wording import counted
from mpdiag.files.documents import finite
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores import kernel_evidence
from mpdiag.tensorcores.causes import TF32, JudgedOperation
from mpdiag.tensorcores.events import TraceReader
from mpdiag.tensorcores.kernel_linking import Linked
from mpdiag.tensorcores.kernels.counters import ADVICE, Vendor
from mpdiag.tensorcores.roofline import speedup
from mpdiag.tensorcores.summary import IDLE_CAUSES, in_words_of, percent
from mpdiag.tensorcores.timeline.sweep import Timeline
from mpdiag.tensorcores.trace_profile import KernelTimes, runs_on_amd

MUCH = 0.1
"""Share of kernel time from which something deserves a warning."""
SOME = 0.05
LINKED = 0.5
_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}


def profile_findings(
    trace: TraceReader,
    times: KernelTimes,
    device: DeviceFacts | None,
    *,
    linked: Linked,
    native: tuple[str, ...],
    judged: Sequence[JudgedOperation],
    timeline: Timeline | None,
) -> tuple[dict[str, Any], ...]:
    """All findings, warnings first; what is said of sizes, rates and idle time stands at the end.

    Args:
        trace: What was read, to its end.
        times: Its kernels.
        device: Its GPU; None where it is not named.
        linked: Its kernels by operation.
        native: The generations whose Tensor Core kernels use the device's own instructions.
        judged: Its operations, and what there is to pad.
        timeline: Its steps and idle time; None where it does not say when its kernels ran.
    """
    amd = runs_on_amd(device, times)
    found = [
        *_matrix_findings(times, device, amd=amd),
        *_kernel_findings(times, native, padded=any(j.faults for j in judged), amd=amd),
        *_contradictions(times, trace.tensor_active),
        *_reading_findings(trace, linked),
        *_device_findings(trace, device),
    ]
    found.sort(key=lambda f: f["severity"] == "info")
    found += [*_padding(judged), *_rates(judged), *_idle(timeline)]
    return tuple(
        {**f, **{field: in_words_of(f[field], amd=amd) for field in ("message", "fix")}}
        for f in found
    )


def _padding(judged: Sequence[JudgedOperation]) -> Iterator[dict[str, Any]]:
    """What padding sizes read from a trace does not prove, if padding is advised at all."""
    odd = [j for j in judged if j.cause == "alignment"]
    if odd:
        yield note(
            "info",
            "padding-not-proved",
            "a trace shows the sizes of single products, so the padded sizes may not fit together "
            "(heads, shared weights, sums, concatenations)",
            "record a few steps (mpdiag record) and analyze them: that gives one set of sizes for the "
            "model",
            operations=sorted({j.operation.module or j.operation.op for j in odd}),
        )


def _rates(judged: Sequence[JudgedOperation]) -> Iterator[dict[str, Any]]:
    """Rates above the published peak, which say something of the clock or of the work."""
    above = [j for j in judged if j.rate is not None and j.rate.above_peak]
    if not above:
        return
    first = max(above, key=lambda j: j.operation.time_us)
    rate = first.rate
    assert rate is not None
    assert rate.peak is not None
    place = first.operation.module or first.operation.op
    shortcuts = any(j.operation.work and j.operation.work.kind == "convolution" for j in above)
    why = "the clock ran above the published one"
    if shortcuts:
        why += ", or the kernel does less arithmetic than the convolution asks for (Winograd, FFT)"
    yield note(
        "info",
        "rate-above-peak",
        f"{counted(len(above), 'operation')} ran faster than the published peak ({place}: "
        f"{rate.least:.3g} of {rate.peak:g} TFLOP/s), so no share of it is given: {why}",
        "watch the clock while it runs, with nvidia-smi dmon",
        operations=sorted({j.operation.module or j.operation.op for j in above}),
    )


def _idle(timeline: Timeline | None) -> Iterator[dict[str, Any]]:
    """Time in which the GPU had nothing to do, and the largest cause of it."""
    if timeline is None or timeline.whole.idle_fraction < MUCH:
        return
    whole = timeline.whole
    cause = max(whole.gaps, key=lambda c: whole.gaps[c])
    share = whole.gaps[cause] / whole.wall_us
    yield note(
        "info",
        "gpu-idle",
        f"the GPU was idle for {percent(whole.idle_fraction)} of the recorded time, "
        f"{percent(share)} because {IDLE_CAUSES[cause]['because']}; "
        "recording itself slows the host down",
        IDLE_CAUSES[cause]["fix"],
        fraction=whole.idle_fraction,
        causes={c: spent / whole.wall_us for c, spent in whole.gaps.items() if spent},
        amdahl_bound=finite(speedup(whole.idle_fraction)),
    )


def note(severity: str, code: str, message: str, fix: str, **evidence: Any) -> dict[str, Any]:
    """A finding as a document."""
    return {
        "severity": severity,
        "code": code,
        "message": message,
        "evidence": evidence,
        "fix": fix,
        "explained": command_for(code),
    }


def _matrix_findings(
    times: KernelTimes, device: DeviceFacts | None, *, amd: bool
) -> Iterator[dict[str, Any]]:
    tensor, cuda = times.fraction("tensor_core"), times.fraction("cuda_core")
    if cuda >= SOME:
        without = " and nothing on Tensor Cores" if not tensor else ""
        yield note(
            "warning",
            "matrix-on-cuda-cores",
            f"{percent(cuda)} of kernel time is matrix work on CUDA cores{without}",
            _off_cuda_cores(device, amd=amd),
            fraction=cuda,
            amdahl_bound=finite(speedup(cuda)),
        )
    layout = times.fraction("layout")
    if layout >= SOME:
        yield note(
            "warning",
            "layout-conversions",
            f"{percent(layout)} of kernel time converts between NCHW and NHWC",
            "keep model and inputs in memory_format=torch.channels_last",
            fraction=layout,
            amdahl_bound=finite(speedup(layout)),
        )


def _off_cuda_cores(device: DeviceFacts | None, *, amd: bool) -> str:
    """How to leave CUDA cores, depending on the GPU, which the trace may not name."""
    generation = device.generation if device is not None else None
    if amd or (generation is not None and generation not in TF32):
        return "train in mixed precision"
    where = " where the GPU has TF32" if generation is None else ""
    return (
        "train in mixed precision, or allow TF32 with "
        f'torch.set_float32_matmul_precision("high"){where}'
    )


def _kernel_findings(
    times: KernelTimes, native: tuple[str, ...], *, padded: bool, amd: bool
) -> Iterator[dict[str, Any]]:
    unknown = times.fraction("unknown", measured=True)
    if unknown >= MUCH:
        largest = next(k.name for k in times.kernels if k.measured_verdict == "unknown")
        vendor: Vendor = "amd" if amd else "nvidia"
        yield note(
            "warning",
            "unknown-kernels",
            f"{percent(unknown)} of kernel time is in kernels that mpdiag does not know by name",
            f"measure them with {ADVICE[vendor]}",
            fraction=unknown,
            largest=largest[:200],
        )
    old = times.generation_fraction(lambda given: given not in ("", *native)) if native else 0.0
    if old >= SOME:
        names = {
            k.facts.generation: k.name[:200]
            for k in reversed(times.kernels)
            if k.facts.verdict == "tensor_core" and k.facts.generation
        }
        yield note(
            "warning" if old >= MUCH else "info",
            "older-generation",
            f"{percent(old)} of kernel time is in Tensor Core kernels that were not written for "
            "this GPU's generation",
            "pad odd dimensions, and update CUDA and cuDNN, so that newer kernels are chosen",
            fraction=old,
            generations=names,
            amdahl_bound=finite(speedup(old)),
        )
    narrow = sum(
        k.time_us
        for k in times.kernels
        if k.facts.verdict == "tensor_core"
        and k.facts.alignment is not None
        and k.facts.alignment * _BYTES.get(k.facts.dtype, 1) < 16
    )
    share = narrow / times.total_us if times.total_us else 0.0
    if share >= SOME:
        yield note(
            "warning",
            "misaligned",
            f"{percent(share)} of kernel time is in Tensor Core kernels chosen for rows that are "
            "not aligned to 16 bytes",
            _PAD if padded else _NOTHING_TO_PAD,
            fraction=share,
            amdahl_bound=finite(speedup(share)),
        )


_PAD = "pad the dimensions named in the table of operations"
_NOTHING_TO_PAD = (
    "this trace names no dimension whose padding would save more than it costs: record a few steps "
    "(mpdiag record) and analyze them, which gives sizes for the model"
)


def _contradictions(times: KernelTimes, sampled: float | None) -> Iterator[dict[str, Any]]:
    for kernel in times.kernels:
        if kernel.measured is not None and kernel_evidence.contradicts(
            kernel.facts, kernel.measured
        ):
            yield note(
                "warning",
                "contradiction",
                f"the name of {kernel.name[:120]} says {kernel.facts.verdict.replace('_', ' ')}, "
                f"but its {kernel.measured.kind} "
                f"{'say' if kernel.measured.kind == 'counters' else 'says'} "
                f"{kernel.measured_verdict.replace('_', ' ')}",
                "trust the measurement, and report the name so that it can be added to the table",
                name=kernel.facts.rule,
                witness=kernel.measured.text,
            )
    tensor = times.fraction("tensor_core")
    if (
        sampled is not None
        and (sampled > SOME) != (tensor > 0)
        and (sampled > SOME or tensor > MUCH)
    ):
        yield note(
            "warning",
            "contradiction",
            f"by name {percent(tensor)} of kernel time is on Tensor Cores, but the sampled "
            f"activity of the Tensor pipe is {percent(sampled)}",
            "trust the samples, and measure the largest kernels with ncu",
            sampled=sampled,
        )


def _reading_findings(trace: TraceReader, linked: Linked) -> Iterator[dict[str, Any]]:
    for problem in trace.problems:
        yield note("warning", "damaged-trace", problem, "record the trace again if it matters")
    if linked.graph_fraction >= SOME:
        yield note(
            "info",
            "cuda-graphs",
            f"{percent(linked.graph_fraction)} of kernel time was replayed from CUDA graphs, which "
            "hide the operation each kernel belongs to",
            "record again without CUDA graphs to see operations and modules",
            fraction=linked.graph_fraction,
        )
    if trace.source == "torch.profiler" and linked.linked_fraction < LINKED:
        why = (
            f"only {percent(linked.linked_fraction)} of kernel time could be linked to operations"
            if linked.operations
            else "the trace holds no host operations"
        )
        yield note(
            "info",
            "not-linked",
            f"{why}, so causes and fixes are given by kernel only",
            "record with ProfilerActivity.CPU and record_shapes=True",
            fraction=linked.linked_fraction,
        )


def _device_findings(trace: TraceReader, device: DeviceFacts | None) -> Iterator[dict[str, Any]]:
    if device is None or not device.name:
        yield note(
            "info",
            "unknown-device",
            "the trace does not name its GPU, so rates and rooflines are left out",
            "record with a newer PyTorch, whose traces hold the device's properties"
            if trace.source == "torch.profiler"
            else "record with torch.profiler, which writes the device's properties",
        )
    elif device.peaks is None:
        yield note(
            "info",
            "unknown-device",
            f"no peak rates are known for {device.name}, so rates and rooflines are left out",
            "add its figures, with their source, to mpdiag/hardware/peaks.tsv",
        )
