"""The fix for each cause, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.hardware.alignment import Fault
    from mpdiag.tensorcores.work.traced_operation import OperationTime

_COLLECTIVES = ("nccl", "record_param_comms", "c10d", "allreduce", "all_reduce", "allgather")

_PLAIN = {
    "none": "",
    "outside": "torch.compile fuses what runs outside matrix products",
    "unknown": "the kernels' names do not say what ran: measure hardware counters with ncu",
    "no_tensor_cores": "this GPU has no Tensor Cores: half precision saves memory, not time",
    "layout": "keep model and input in channels_last: model.to(memory_format=torch.channels_last)",
    "depthwise": "Tensor Cores gain little here: use channels_last, or fewer groups and more channels",
    "memory_bound": "a larger batch or wider layers raise its intensity; torch.compile fuses its "
    "neighbours",
    "tf32_off": 'allow TF32 with torch.set_float32_matmul_precision("high"), or run it in FP16 or '
    "BF16",
    "library_choice": "the library chose a kernel without Tensor Cores: try channels_last, "
    "cudnn.benchmark with constant shapes, or torch.compile(mode='max-autotune')",
}


def fix_for(cause: str, o: OperationTime, faults: tuple[Fault, ...], generation: str | None) -> str:
    """The fix of a cause for an operation on a GPU generation; "" if there is nothing to do."""
    if cause == "alignment":
        return _padding(faults, o) or _unnamed(o)
    if is_collective(o.op):
        return ""
    if cause == "dtype":
        return _other_dtype(o, generation)
    if cause in {"matrix_vector", "latency_limited"}:
        return _more_at_once(o, cause)
    if cause == "tf32_off" and _is_cudnns(o):
        return "allow TF32 with torch.backends.cudnn.allow_tf32 = True, or run it in FP16 or BF16"
    return _PLAIN[cause]


def is_collective(op: str) -> bool:
    """Whether an operation is communication, which no compiler can fuse."""
    return any(word in op.lower() for word in _COLLECTIVES)


def _is_cudnns(o: OperationTime) -> bool:
    """Whether cuDNN's own TF32 setting applies to an operation."""
    if o.work is not None:
        return o.work.kind in {"convolution", "rnn"}
    return "conv" in o.op or "rnn" in o.op


def _unnamed(o: OperationTime) -> str:
    if o.work is None:
        return "pad odd dimensions; a trace of torch.profiler with record_shapes=True names them"
    return "a view starts at an unaligned address: pad the tensor it is cut from"


def _padding(faults: tuple[Fault, ...], o: OperationTime) -> str:
    groups = o.work.groups if o.work is not None and not o.work.depthwise else 1
    return "pad " + ", ".join(_padded(f, groups) for f in faults) if faults else ""


def _padded(fault: Fault, groups: int) -> str:
    words = f"{fault.dimension} {fault.size} → {fault.padded}"
    if groups == 1 or fault.padded % groups:
        return words
    return f"{words} ({fault.size // groups} → {fault.padded // groups} in each of {groups} groups)"


def _other_dtype(o: OperationTime, generation: str | None) -> str:
    dtype = o.dtype or (o.work.dtype if o.work is not None else None) or "this dtype"
    if dtype == "fp32":
        return "run it in FP16: FP32 has no Tensor Core instruction here (see mpdiag analyze)"
    if dtype == "bf16" and generation in {"volta", "turing"}:
        return "run it in FP16: this GPU's Tensor Cores have no BF16"
    return f"run it in FP16 or BF16: this GPU has no Tensor Core instruction for {dtype.upper()}"


def _more_at_once(o: OperationTime, cause: str) -> str:
    kind = o.work.kind if o.work is not None else "matmul"
    if kind == "rnn":
        return "use a larger batch or wider layers: each step waits for the one before"
    if cause == "matrix_vector":
        return "multiply several vectors at once: a larger batch, or concatenated time steps"
    return "merge several products: concatenate gates or time steps, or use a larger batch"
