"""What stands out in a profile, each with its evidence and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.files.documents import finite
from mpdiag.tensorcores import kernel_evidence
from mpdiag.tensorcores.amdahl import speedup
from mpdiag.tensorcores.causes import TF32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpdiag.tensorcores.trace_profile import Profile

MUCH = 0.1
"""Share of kernel time from which something is worth a warning."""
SOME = 0.05
LINKED = 0.5
_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}


def find(p: Profile) -> tuple[dict[str, Any], ...]:
    """All findings, warnings first."""
    found = [*_matrix(p), *_kernels(p), *_contradictions(p), *_reading(p)]
    return tuple(sorted(found, key=lambda f: f["severity"] == "info"))


def _note(severity: str, code: str, message: str, fix: str, **evidence: Any) -> dict[str, Any]:
    return {
        "severity": severity,
        "code": code,
        "message": message,
        "evidence": evidence,
        "fix": fix,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _matrix(p: Profile) -> Iterator[dict[str, Any]]:
    tensor, cuda = p.fraction("tensor_core"), p.fraction("cuda_core")
    if cuda >= SOME:
        without = " and nothing on Tensor Cores" if not tensor else ""
        yield _note(
            "warning",
            "matrix-on-cuda-cores",
            f"{_percent(cuda)} of kernel time is matrix work on CUDA cores{without}",
            _off_cuda_cores(p),
            fraction=cuda,
            amdahl_bound=finite(speedup(cuda)),
        )
    layout = p.fraction("layout")
    if layout >= SOME:
        yield _note(
            "warning",
            "layout-conversions",
            f"{_percent(layout)} of kernel time converts between NCHW and NHWC",
            "keep model and inputs in memory_format=torch.channels_last",
            fraction=layout,
            amdahl_bound=finite(speedup(layout)),
        )


def _off_cuda_cores(p: Profile) -> str:
    """The fix, by what the GPU has; a trace may not name it."""
    generation = p.device.generation if p.device is not None else None
    if generation is not None and generation not in TF32:
        return "train in mixed precision"
    where = " where the GPU has TF32" if generation is None else ""
    return (
        "train in mixed precision, or allow TF32 with "
        f'torch.set_float32_matmul_precision("high"){where}'
    )


def _kernels(p: Profile) -> Iterator[dict[str, Any]]:
    unknown = p.fraction("unknown", measured=True)
    if unknown >= MUCH:
        largest = next(k.name for k in p.kernels if k.measured_verdict == "unknown")
        yield _note(
            "warning",
            "unknown-kernels",
            f"the names of kernels that take {_percent(unknown)} of the time do not say what ran",
            "measure them with rocprofv3, whose SQ_INSTS_VALU_MFMA counters tell"
            if any(k.facts.generation.startswith("gfx") for k in p.kernels)
            else "measure them with ncu --csv --metrics sm__inst_executed_pipe_tensor.sum",
            fraction=unknown,
            largest=largest[:200],
        )
    tensor, native = p.fraction("tensor_core"), p.native_generation_fraction
    if native is not None and tensor - native >= SOME:
        old = tensor - native
        names = {
            k.facts.generation: k.name[:200]
            for k in reversed(p.kernels)
            if k.facts.verdict == "tensor_core"
        }
        yield _note(
            "warning" if old >= MUCH else "info",
            "older-generation",
            f"{_percent(old)} of kernel time is in Tensor Core kernels that were not written for "
            "this GPU's generation",
            "pad odd dimensions, and update CUDA and cuDNN, so that newer kernels are chosen",
            fraction=old,
            generations=names,
            amdahl_bound=finite(speedup(old)),
        )
    narrow = sum(
        k.time_us
        for k in p.kernels
        if k.facts.verdict == "tensor_core"
        and k.facts.alignment is not None
        and k.facts.alignment * _BYTES.get(k.facts.dtype, 1) < 16
    )
    share = narrow / p.kernel_time_us if p.kernel_time_us else 0.0
    if share >= SOME:
        yield _note(
            "warning",
            "misaligned",
            f"{_percent(share)} of kernel time is in Tensor Core kernels chosen for rows that are "
            "not aligned to 16 bytes",
            "pad the dimensions that the table of operations names",
            fraction=share,
            amdahl_bound=finite(speedup(share)),
        )


def _contradictions(p: Profile) -> Iterator[dict[str, Any]]:
    for kernel in p.kernels:
        if kernel.measured is not None and kernel_evidence.contradicts(
            kernel.facts, kernel.measured
        ):
            yield _note(
                "warning",
                "contradiction",
                f"the name of {kernel.name[:120]} says {kernel.facts.verdict.replace('_', ' ')}, "
                f"its {kernel.measured.kind} says {kernel.measured_verdict.replace('_', ' ')}",
                "trust the measurement, and report the name so that the table learns it",
                name=kernel.facts.rule,
                witness=kernel.measured.text,
            )
    sampled, tensor = p.tensor_active, p.fraction("tensor_core")
    if (
        sampled is not None
        and (sampled > SOME) != (tensor > 0)
        and (sampled > SOME or tensor > MUCH)
    ):
        yield _note(
            "warning",
            "contradiction",
            f"by name {_percent(tensor)} of kernel time is on Tensor Cores, but the sampled "
            f"activity of the Tensor pipe is {_percent(sampled)}",
            "believe the samples, and measure the largest kernels with ncu",
            sampled=sampled,
        )


def _reading(p: Profile) -> Iterator[dict[str, Any]]:
    for problem in p.problems:
        yield _note("warning", "damaged-trace", problem, "record the trace again if it matters")
    if p.graph_fraction >= SOME:
        yield _note(
            "info",
            "cuda-graphs",
            f"{_percent(p.graph_fraction)} of kernel time was replayed from CUDA graphs, which "
            "hide the operation each kernel belongs to",
            "record once more without graphs to see operations and modules",
            fraction=p.graph_fraction,
        )
    if p.source == "torch.profiler" and p.linked_fraction < LINKED:
        why = (
            "the trace holds no operations of the host"
            if not p.has_operations
            else (
                f"only {_percent(p.linked_fraction)} of kernel time could be linked to operations"
            )
        )
        yield _note(
            "info",
            "not-linked",
            f"{why}: causes and fixes are told by kernel alone",
            "record with ProfilerActivity.CPU and record_shapes=True",
            fraction=p.linked_fraction,
        )
    if p.device is None or not p.device.name:
        yield _note(
            "info",
            "unknown-device",
            "the trace does not name its GPU, so rates and rooflines are left out",
            "record with a newer PyTorch, whose traces hold the device's properties"
            if p.source == "torch.profiler"
            else "record with torch.profiler, which writes the device's properties",
        )
    elif p.device.peaks is None:
        yield _note(
            "info",
            "unknown-device",
            f"no peak rates are known for {p.device.name}, so rates and rooflines are left out",
            "add its figures, with their source, to mpdiag/hardware/peaks.py",
        )
