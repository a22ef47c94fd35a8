"""The counting kernel for CUDA: one pass over the tensor, one table per program, integer atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mpdiag.recording.counting import layout

_BLOCK = 4096
_WARPS = 8
"""With Triton's 4 a thread has more to keep than it has registers (measured for sm_90 with ptxas)."""
_SUBNORMALS = tl.constexpr(layout.SUBNORMALS)
_ZEROS = tl.constexpr(layout.ZEROS)
_INFS = tl.constexpr(layout.INFS)
_NANS = tl.constexpr(layout.NANS)
_FP16_OVERFLOW = tl.constexpr(layout.FP16_OVERFLOW)
_QUARTERS = tl.constexpr(layout.QUARTERS)


# Each combination of what is specialised is compiled apart, which takes seconds, in the middle of a
# training. Rows lie at any multiple of 8 bytes, and tensors need any number of rounds.
@triton.jit(do_not_specialize=["rounds"], do_not_specialize_on_alignment=["counts", "edges"])
def _kernel(values, counts, edges, n, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Each program strides over the tensor, keeps its table in registers, adds it once at the end.

    Positions past the end read as zero and are taken off the zeros again.
    """
    table = tl.zeros((1024,), tl.int32)
    zeros = tl.zeros((BLOCK,), tl.int32)
    subnormals = tl.zeros((BLOCK,), tl.int32)
    infs = tl.zeros((BLOCK,), tl.int32)
    nans = tl.zeros((BLOCK,), tl.int32)
    overflow = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32)
    low = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for _ in range(rounds):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < n
        bits = tl.load(values + offset, mask=inside, other=0) & 0x7FFFFFFF
        table += tl.histogram(((bits - 1) >> 21) & 1023, 1024)
        finite = bits < 0x7F800000
        zeros += ((bits == 0) & inside).to(tl.int32)
        subnormals += ((bits > 0) & (bits < 0x00800000)).to(tl.int32)
        infs += (bits == 0x7F800000).to(tl.int32)
        nans += (bits > 0x7F800000).to(tl.int32)
        overflow += (finite & (bits >= 0x477FF000)).to(tl.int32)
        high = tl.maximum(high, tl.where(finite, bits, 0))
        low = tl.minimum(low, tl.where(finite & (bits > 0), bits, 0x7FFFFFFF))
        start += stride
    index = tl.arange(0, 1024)
    tl.atomic_add(counts + index, table.to(tl.int64), mask=(index < _QUARTERS) & (table > 0))
    infinite = tl.sum(infs).to(tl.int64)
    tl.atomic_add(counts + _QUARTERS - 1, -infinite)
    tl.atomic_add(counts + _INFS, infinite)
    tl.atomic_add(counts + _ZEROS, tl.sum(zeros).to(tl.int64))
    tl.atomic_add(counts + _SUBNORMALS, tl.sum(subnormals).to(tl.int64))
    tl.atomic_add(counts + _NANS, tl.sum(nans).to(tl.int64))
    tl.atomic_add(counts + _FP16_OVERFLOW, tl.sum(overflow).to(tl.int64))
    tl.atomic_max(edges, tl.max(high))
    tl.atomic_min(edges + 1, tl.min(low))


def triton_tally(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    """Add float32 values to a raw row; see ``device.torch_tally``. Waits for nothing."""
    n = values.numel()
    blocks = triton.cdiv(n, _BLOCK)
    programs = min(blocks, _programs(values.device))
    edges = torch.zeros(
        2, dtype=torch.int32, device=values.device
    )  # filled there: a copy would wait
    edges[1].fill_(0x7FFFFFFF)
    rounds = triton.cdiv(blocks, programs)
    with _on(values.device):
        _kernel[(programs,)](
            values.view(torch.int32), counts, edges, n, rounds, BLOCK=_BLOCK, num_warps=_WARPS
        )
    found = edges.view(torch.float32).double()
    found = torch.stack([found[0], torch.where(edges[1] == 0x7FFFFFFF, torch.inf, found[1])])
    extremes[0] = torch.maximum(extremes[0], found[0])
    extremes[1] = torch.minimum(extremes[1], found[1])


def _programs(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)
