"""Matrix products that add up in FP16, as an ablation: what Tensor Cores' FP32 accumulators are for.

A Tensor Core instruction multiplies a few columns by as many rows, adds the products up inside at
higher precision, and adds the result to its accumulator (NVIDIA PTX ISA, ``mma.m16n8k16``, where the
accumulator may be FP16 or FP32). With an FP16 accumulator every one of these additions is rounded to
11 bits; once the sum is 2,048 times an addend, the addend is gone. Linear layers, attention and
recurrent cells are covered; convolutions and fused kernels keep FP32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 16
"""Products that one instruction adds up before it rounds."""

_PRODUCTS = frozenset(
    {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
)


def accumulates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an ATen operation is a product of low-precision matrices, to be added low."""
    low = all(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in args)
    return func.overloadpacket in _PRODUCTS and low and not kwargs


def product(*args: Tensor) -> Tensor:
    """The product of FP16 matrices, with what is added to it, summed in FP16.

    Args:
        args: Two matrices (…, M, K) and (…, K, N), or three tensors, the first to be added at the
            end.
    """
    *added, a, b = args
    wide_a, wide_b = a.float(), b.float()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[-1], DEPTH):
        part = wide_a[..., k : k + DEPTH] @ wide_b[..., k : k + DEPTH, :]
        total = part.add_(total).to(a.dtype)
    return total + added[0] if added else total
