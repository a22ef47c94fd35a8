"""Which operations could have used Tensor Cores, and which did.

An operation is eligible if it is a matrix product (or a convolution, an RNN, an attention) of a shape
with more than one row and column, in a dtype that the GPU's Tensor Cores take, or in FP32, which
TF32 or mixed precision brings there. Depthwise convolutions and products with a vector are not. An
operation that ran on Tensor Cores is eligible, whatever else is known of it.

What a trace does not say stays unknown: a product whose shapes were not recorded, a kernel whose
name does not tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.tensorcores import kernel_evidence

if TYPE_CHECKING:
    from mpdiag.hardware.devices import DeviceFacts
    from mpdiag.tensorcores.work.products import MatrixWork
    from mpdiag.tensorcores.work.traced_operation import OperationTime


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
