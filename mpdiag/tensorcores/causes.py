"""Why an operation does not use Tensor Cores well, what to do about it, and what that could gain.

The causes, in the order in which they are checked:

====================  ==============================================================================
``outside``           no matrix work: elementwise, normalisation, collectives …
``unknown``           its kernels' names do not say what ran; never counted as a no
``no_tensor_cores``   the GPU has no Tensor Cores
``alignment``         a dimension is not a multiple of 16 bytes (if on Tensor Cores: a slow kernel)
``layout``            on Tensor Cores, but much of the time converts between NCHW and NHWC
``none``              on Tensor Cores
``depthwise``         few channels per group, so there is little arithmetic to speed up
``matrix_vector``     a matrix times a vector
``latency_limited``   too small to fill the device
``memory_bound``      memory limits it even at the rate of the ordinary cores
``tf32_off``          FP32 on a GPU that has TF32
``dtype``             a dtype for which this GPU has no Tensor Core instruction, or FP32 on Volta
``library_choice``    none of these: the library chose another kernel
====================  ==============================================================================

An operation is eligible for Tensor Cores if it is a matrix product (or a convolution, an RNN, an
attention) of a shape with more than one row and column, in a dtype that the GPU's Tensor Cores take, or
in FP32, which TF32 or mixed precision brings there. Depthwise convolutions and products with a vector
are not. An operation that ran on Tensor Cores is eligible, whatever else is known of it. What a trace
does not say stays unknown: a product whose shapes were not recorded, a kernel whose name does not tell.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mpdiag.files.documents import finite
from mpdiag.hardware import alignment as shapes
from mpdiag.hardware.alignment import Fault
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores import kernel_evidence, roofline
from mpdiag.tensorcores.work.products import MatrixWork
from mpdiag.tensorcores.work.traced_operation import OperationTime

CauseCode = Literal[
    "outside",
    "unknown",
    "no_tensor_cores",
    "alignment",
    "layout",
    "none",
    "depthwise",
    "matrix_vector",
    "latency_limited",
    "memory_bound",
    "tf32_off",
    "dtype",
    "library_choice",
]

LAYOUT_SHARE = 0.05
"""Share of an operation's time from which layout conversions are worth fixing."""
TILE = 64
"""Side of the smallest output tile a matrix kernel commonly gives to one multiprocessor."""
SHORT_US = 5.0
"""A call shorter than this takes about as long as a kernel launch."""

TF32 = {"ampere", "ada", "hopper", "blackwell"}
"""Generations that have TF32."""


@dataclass(frozen=True)
class JudgedOperation:
    """An operation with the cause found for it.

    Attributes:
        operation: Its measured times.
        cause: See the module's table.
        fix: What to do, in one sentence; "" where there is nothing to do.
        faults: Dimensions to pad.
        aligned: Whether every dimension that matters is a multiple of 16 bytes; None where the
            shape or the dtype is not known.
        affected_us: The part of its time that the fix affects.
        amdahl_bound: The speed-up of the whole if that part vanished: an upper bound of any fix.
        win_us: An estimate of the time saved: ``affected_us`` minus the least time that the
            roofline allows; None where the device or the shape is not known.
        placement: Its roofline point on Tensor Cores; None where the device or shape is not known.
        eligible: Whether it could use Tensor Cores; None where the trace does not tell.
        used: Whether it did, by names and rates; None where neither says.
        rate: What it achieved; None where its work is not known.
    """

    operation: OperationTime
    cause: CauseCode
    fix: str
    faults: tuple[Fault, ...]
    aligned: bool | None
    affected_us: float
    amdahl_bound: float
    win_us: float | None
    placement: roofline.RooflinePoint | None
    eligible: bool | None = None
    used: bool | None = None
    rate: roofline.AchievedRate | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of ``operations`` in ``mpdiag profile --json``."""
        o, work, placed = self.operation, self.operation.work, self.placement
        return {
            "op": o.op,
            "module": o.module,
            "phase": o.phase,
            "kind": work.kind if work else None,
            "m": (work.m or None) if work else None,
            "n": (work.n or None) if work else None,
            "k": (work.k or None) if work else None,
            "batch": work.batch if work else None,
            "dtype": o.dtype or (work.dtype if work else None),
            "aligned": self.aligned,
            "verdict": o.verdict,
            "kernel": o.kernel,
            "cause": self.cause,
            "fix": self.fix,
            "padded": [
                {"dimension": f.dimension, "size": f.size, "padded": f.padded} for f in self.faults
            ],
            "calls": o.calls,
            "time_us": o.time_us,
            "tensor_core_us": o.tensor_core_us,
            "cuda_core_us": o.cuda_core_us,
            "helper_us": o.helper_us,
            "layout_us": o.layout_us,
            "other_us": o.other_us,
            "unknown_us": o.unknown_us,
            "affected_us": self.affected_us,
            "amdahl_bound": finite(self.amdahl_bound),
            "win_us": self.win_us,
            "flops": work.flops or None if work else None,
            "bytes": roofline.moved_bytes(o),
            "intensity": placed.intensity if placed else None,
            "ridge": placed.ridge if placed else None,
            "bound": placed.bound if placed else None,
            "eligible": self.eligible,
            "used": self.used,
            "flops_least": work.least_flops or None if work else None,
            **roofline.rate_json(self.rate),
        }


@dataclass(frozen=True)
class Worth:
    """What fixing one cause everywhere could gain.

    Attributes:
        cause: The cause; "all" for every cause that has a fix.
        operations: Number of operations with this cause.
        affected_us: The part of their time that the fix affects.
        amdahl_bound: The speed-up of the whole if that time vanished.
        win_us: Sum of the known estimates; None where there is none.
    """

    cause: str
    operations: int
    affected_us: float
    amdahl_bound: float
    win_us: float | None

    def to_json(self) -> dict[str, Any]:
        """The entry of ``worth`` in ``mpdiag profile --json``."""
        return asdict(self) | {"amdahl_bound": finite(self.amdahl_bound)}


def judge(
    operations: Iterable[OperationTime],
    device: DeviceFacts | None,
    *,
    total_us: float | None = None,
    amd: bool = False,
) -> list[JudgedOperation]:
    """Find each operation's cause and fix.

    Args:
        operations: With their measured times.
        device: The GPU; None where it is not known.
        total_us: Time of all kernels, which bounds are shares of; default: of the operations.
        amd: Whether the GPU is AMD's, as its kernels say where the trace does not name it.

    Returns:
        Those with the most time to gain first: by the estimate if there is one, else by the time
        that the fix affects.
    """
    measured = list(operations)
    whole = sum(o.time_us for o in measured) if total_us is None else total_us
    gpu = device or DeviceFacts(name="")
    alone = (_alignment(o, _target_dtype(o, gpu.generation), gpu.generation)[0] for o in measured)
    together = shapes.common_multiples(fault for faults in alone for fault in faults)
    judged = [_judge_one(o, gpu, whole, together, amd=amd) for o in measured]
    return sorted(judged, key=lambda j: (_to_win(j), j.operation.time_us), reverse=True)


def worth(judged: Sequence[JudgedOperation], total_us: float) -> list[Worth]:
    """What fixing each cause could gain, largest first, and all causes together at the end."""
    fixable = [j for j in judged if j.affected_us > 0]
    by_cause: dict[str, list[JudgedOperation]] = {}
    for item in fixable:
        by_cause.setdefault(item.cause, []).append(item)
    found = [_sum(cause, members, total_us) for cause, members in by_cause.items()]
    found.sort(key=lambda w: w.affected_us, reverse=True)
    return [*found, _sum("all", fixable, total_us)]


def _sum(cause: str, members: Sequence[JudgedOperation], total_us: float) -> Worth:
    affected = sum(j.affected_us for j in members)
    known = [j.win_us for j in members if j.win_us is not None]
    bound = roofline.speedup(affected / total_us) if total_us > 0 else 1.0
    return Worth(cause, len(members), affected, bound, sum(known) if known else None)


def _to_win(judged: JudgedOperation) -> float:
    """Used for sorting only: fusion saves one of two passes over memory, about half the time."""
    if judged.win_us is not None:
        return judged.win_us
    return judged.affected_us / 2 if judged.cause == "outside" else judged.affected_us


def _judge_one(
    o: OperationTime, device: DeviceFacts, whole: float, together: Mapping[int, int], *, amd: bool
) -> JudgedOperation:
    peaks = device.peaks
    generation = "cdna" if amd and device.generation is None else device.generation
    dtype = _target_dtype(o, generation)
    alone, aligned = _alignment(o, dtype, generation)
    faults = shapes.worth_padding(alone, together)
    cause = _cause(o, device, faults, dtype)
    placement = (
        roofline.roofline_point(o.work, peaks, dtype)
        if o.work is not None and peaks is not None
        else None
    )
    affected = o.layout_us if cause == "layout" else o.time_us  # what its fix affects
    if cause in {"none", "unknown", "no_tensor_cores"} or is_collective(o.op):
        affected = 0.0
    win = None
    if placement is not None and affected:
        must = placement.least_us * o.calls if affected == o.time_us else 0.0
        win = max(0.0, affected - must)
    used = is_used(o, device)
    return JudgedOperation(
        operation=o,
        cause=cause,
        fix=fix_for(cause, o, faults, generation),
        faults=faults if cause == "alignment" else (),
        aligned=aligned,
        affected_us=affected,
        amdahl_bound=roofline.speedup(affected / whole) if whole > 0 else 1.0,
        win_us=win,
        placement=placement,
        eligible=is_eligible(o, device),
        used=used,
        rate=roofline.achieved_rate(o, device, used=used),
    )


def _target_dtype(o: OperationTime, generation: str | None) -> str:
    """The dtype an operation runs in, or the one it would use on Tensor Cores."""
    dtype = o.dtype or (o.work.dtype if o.work is not None else None) or "fp32"
    if dtype == "fp32":
        return "tf32" if generation in TF32 else "fp16"
    return dtype if shapes.is_sized(dtype) else "fp16"


def _alignment(
    o: OperationTime, dtype: str, generation: str | None
) -> tuple[tuple[Fault, ...], bool | None]:
    if o.work is None or not (o.dtype or o.work.dtype):
        return (), None
    found = misaligned(o.work, dtype, generation)
    return found, not found


def misaligned(work: MatrixWork, dtype: str, generation: str | None) -> tuple[Fault, ...]:
    """The dimensions that should be padded.

    Where strides are known, M counts only if a row of A or C begins at a multiple of it, that is,
    if A is transposed. A leading dimension that is not one of the sizes (a view into something
    wider) counts as well. In a convolution with groups each group's channels count.
    """
    sizes = list(work.sizes)
    if work.leading:
        sizes = [(n, s) for n, s in sizes if n != "M" or s in work.leading]
        known = {s for _, s in sizes}
        sizes += [
            (f"leading dimension of {letter}", s)
            for letter, s in zip("ABC", work.leading, strict=True)
            if s > 1 and s not in known
        ]
    if work.groups == 1 or work.depthwise:
        return shapes.faults(sizes, dtype, generation)
    each = shapes.faults([(n, s // work.groups) for n, s in sizes], dtype, generation)
    count = work.groups
    return tuple(
        shapes.Fault(f.dimension, count * f.size, count * f.multiple, count * f.padded)
        for f in each
    )


def _cause(
    o: OperationTime, device: DeviceFacts, faults: tuple[Fault, ...], dtype: str
) -> CauseCode:
    if o.work is None and o.tensor_core_us == o.cuda_core_us == 0:
        return "unknown" if o.unknown_us > o.time_us / 2 else "outside"
    if device.has_tensor_cores is False:
        return "no_tensor_cores"
    if o.unknown_us > max(o.tensor_core_us, o.cuda_core_us):
        return "unknown"
    if o.tensor_core_us > 0 and o.tensor_core_us >= o.cuda_core_us:
        return _cause_on_tensor_cores(o, device, faults, dtype)
    return _cause_of_size(o, device, dtype) or _cause_of_dtype(o, device, faults)


def _cause_on_tensor_cores(
    o: OperationTime, device: DeviceFacts, faults: tuple[Fault, ...], dtype: str
) -> CauseCode:
    if o.kernel_alignment is not None:
        good = shapes.alignment(dtype, None).good
        if o.kernel_alignment < good and (faults or o.work is None):
            return "latency_limited" if _is_too_small(o, device) else "alignment"
    return "layout" if o.layout_us > LAYOUT_SHARE * o.time_us else "none"


def _cause_of_size(o: OperationTime, device: DeviceFacts, dtype: str) -> CauseCode | None:
    """The cause if the shape is at fault, whatever the dtype; else None."""
    work = o.work
    if work is None:
        return None
    if not has_matrix_shape(work):
        return "matrix_vector" if work.kind == "matmul" else "depthwise"
    if _is_too_small(o, device):
        return "latency_limited"
    peaks = device.peaks
    if peaks is not None and roofline.memory_bound_anyway(work, peaks, dtype):
        return "memory_bound"
    return None


def _is_too_small(o: OperationTime, device: DeviceFacts) -> bool:
    """Whether calls are about as short as a launch and leave most of the device idle.

    Where the device is not known: whether all is in one tile, which no device shares out.
    """
    work = o.work
    if work is None or not o.calls or o.time_us / o.calls >= SHORT_US:
        return False
    tiles = work.batch * math.ceil(work.m / TILE) * math.ceil(work.n / TILE)
    processors = device.processors or (device.peaks.processors if device.peaks else None)
    return 0 < tiles < processors / 2 if processors is not None else tiles == 1


def _cause_of_dtype(o: OperationTime, device: DeviceFacts, faults: tuple[Fault, ...]) -> CauseCode:
    dtype = o.dtype or (o.work.dtype if o.work is not None else None)
    generation = device.generation
    if dtype == "fp32" and generation not in TF32:
        return "dtype"
    if dtype == "fp32" and o.tensor_core_us == 0:  # otherwise other calls of it did run in TF32
        return "tf32_off"
    if dtype not in {None, "fp32"} and has_no_instruction(str(dtype), device):
        return "dtype"
    return "alignment" if faults else "library_choice"


_COLLECTIVES = ("nccl", "record_param_comms", "c10d", "allreduce", "all_reduce", "allgather")

_FIXES = {row["cause"]: row["fix"] for row in read_table(Path(__file__).with_name("causes.tsv"))}
"""Of causes whose fix is always the same."""


def fix_for(cause: str, o: OperationTime, faults: tuple[Fault, ...], generation: str | None) -> str:
    """The fix of a cause for an operation on a GPU generation; "" if there is nothing to do."""
    if cause == "alignment":
        return _padding(faults, o)
    if is_collective(o.op):
        return ""
    if cause == "dtype":
        return _other_dtype(o, generation)
    if cause in {"matrix_vector", "latency_limited"}:
        return _more_at_once(o, cause)
    if cause == "library_choice":
        return _another_kernel(o, generation)
    if cause == "tf32_off" and _is_cudnns(o):
        return "allow TF32 with torch.backends.cudnn.allow_tf32 = True, or run it in FP16 or BF16"
    return _FIXES[cause]


def is_collective(op: str) -> bool:
    """Whether an operation is communication, which no compiler can fuse."""
    return any(word in op.lower() for word in _COLLECTIVES)


def _is_cudnns(o: OperationTime) -> bool:
    """Whether cuDNN's own TF32 setting applies to an operation."""
    if o.work is not None:
        return o.work.kind in {"convolution", "rnn"}
    return _is_convolution(o) or "rnn" in o.op


def _is_convolution(o: OperationTime) -> bool:
    return o.work.kind == "convolution" if o.work is not None else "conv" in o.op


def _another_kernel(o: OperationTime, generation: str | None) -> str:
    """How to get another kernel for what ran: layouts are of convolutions only."""
    why = "the library chose a kernel without Tensor Cores: try "
    compiled = "torch.compile(mode='max-autotune')"
    if _is_convolution(o):
        return f"{why}channels_last, cudnn.benchmark with constant shapes, or {compiled}"
    if o.work is not None and o.work.kind == "rnn":
        return f"{why}a larger batch or wider layers"
    if o.work is not None and o.work.kind == "attention":
        return f"{why}another backend with torch.nn.attention.sdpa_kernel"
    tuned = "PYTORCH_TUNABLEOP_ENABLED=1, or " if generation == "cdna" else ""
    return f"{why}{tuned}{compiled}"


def _padding(faults: tuple[Fault, ...], o: OperationTime) -> str:
    if faults:
        groups = o.work.groups if o.work is not None and not o.work.depthwise else 1
        return "pad " + ", ".join(_padded(f, groups) for f in faults)
    if o.work is None:
        return "pad odd dimensions; a trace of torch.profiler with record_shapes=True names them"
    return "a view starts at an unaligned address: pad the tensor it is cut from"


def _padded(fault: Fault, groups: int) -> str:
    words = f"{fault.dimension} {fault.size} → {fault.padded}"
    if groups == 1 or fault.padded % groups:
        return words
    return f"{words} ({fault.size // groups} → {fault.padded // groups} in each of {groups} groups)"


def _other_dtype(o: OperationTime, generation: str | None) -> str:
    dtype = o.dtype or (o.work.dtype if o.work is not None else None) or "this dtype"
    if dtype == "fp32" and generation == "cdna":
        return "run it in FP16 or BF16, which Tensor Cores multiply faster than FP32"
    if dtype == "fp32":
        return "run it in FP16: FP32 has no Tensor Core instruction here (see mpdiag analyze)"
    if dtype == "bf16" and generation in {"volta", "turing"}:
        return "run it in FP16: this GPU's Tensor Cores have no BF16"
    return f"run it in FP16 or BF16: this GPU has no Tensor Core instruction for {dtype.upper()}"


def _more_at_once(o: OperationTime, cause: str) -> str:
    kind = o.work.kind if o.work is not None else "matmul"
    if kind == "rnn":
        return "each step waits for the one before: use a larger batch or wider layers"
    if cause == "matrix_vector":
        return "multiply several vectors at once: a larger batch, or concatenated time steps"
    return "merge several products: concatenate gates or time steps, or use a larger batch"


NARROW = 8
"""Channels per group below which a convolution has too little arithmetic for Tensor Cores."""
_LACKING = {
    "volta": {"bf16", "tf32", "int8", "fp64", "fp8", "fp8_e4m3", "fp8_e5m2", "fp4"},
    "turing": {"bf16", "tf32", "fp64", "fp8", "fp8_e4m3", "fp8_e5m2", "fp4"},
    "ampere": {"fp8", "fp8_e4m3", "fp8_e5m2", "fp4"},
    "ada": {"fp4"},
    "hopper": {"fp4"},
}
_DOUBLE = {(8, 0), (9, 0), (10, 0)}
"""Capabilities with FP64 on Tensor Cores at more than a trickle (CUDA Programming Guide)."""


def has_no_instruction(dtype: str, device: DeviceFacts) -> bool:
    """Whether a GPU's Tensor Cores are known not to take a dtype."""
    if device.peaks is not None:
        return device.peaks.tensor_rate(dtype) is None
    return dtype in _LACKING.get(device.generation or "", set())


def has_matrix_shape(work: MatrixWork) -> bool:
    """Whether a product's shape gives Tensor Cores something to do."""
    if work.depthwise or (work.groups > 1 and min(work.n, work.k) < NARROW):
        return False
    return not (work.kind == "matmul" and min(work.m, work.n) == 1)


def is_eligible(o: OperationTime, device: DeviceFacts) -> bool | None:
    """Whether an operation could use Tensor Cores; None where the trace does not tell."""
    if o.tensor_core_us > 0 or is_used(o, device):
        return True
    if device.has_tensor_cores is False:
        return False
    if o.work is None:
        return None if o.cuda_core_us > 0 or o.unknown_us > o.time_us / 2 else False
    if not has_matrix_shape(o.work):
        return False
    dtype = o.dtype or o.work.dtype
    if dtype is None or device.generation is None:
        return None
    return _takes(dtype, device)


def _takes(dtype: str, device: DeviceFacts) -> bool | None:
    """Whether Tensor Cores take a dtype, FP32 by way of TF32 or mixed precision."""
    if dtype in ("fp32", "tf32"):
        return True
    if dtype == "fp64" and device.peaks is None:
        return device.capability in _DOUBLE
    if dtype.startswith("complex"):
        return None
    return not has_no_instruction(dtype, device)


def is_used(o: OperationTime, device: DeviceFacts) -> bool | None:
    """Whether an operation used Tensor Cores, by names and rates; None where neither says."""
    if o.verdict == "tensor_core":
        return True
    proof = kernel_evidence.by_rate(o, device.peaks_at_most)
    if o.verdict in ("cuda_core", "unknown") and proof is not None:
        return True
    return None if o.verdict == "unknown" else False
