"""An ablation: matrix products and reductions that accumulate in FP16 instead of FP32.

A Tensor Core instruction multiplies a few columns by as many rows, adds the products internally at
higher precision, and adds the result to its accumulator (NVIDIA PTX ISA, ``mma.m16n8k16``, where the
accumulator may be FP16 or FP32). With an FP16 accumulator every one of these additions is rounded to
11 bits; once the sum is 2,048 times an addend, the addend is gone. Linear layers, attention and
recurrent cells are covered; convolutions and fused kernels keep FP32.

Reductions are sums of many elements, in normalizations and softmax above all; "Mixed Precision
Training" (section 3.3) reads and writes them in FP16 and adds them up in FP32. Here they add one
element after another to an FP16 accumulator, whatever the policy computes the rest in. The mean
inside a loss function keeps FP32: no gradient depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table

from mpdiag.emulation.mode import Emulation

DEPTH = 16
"""Products that one instruction adds before it rounds."""

_PRODUCTS = frozenset(
    {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
)

_MEANS = frozenset({torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.var_mean})

# Operations that contain such sums, according to PyTorch's decompositions.
_MADE_OF_SUMS = frozenset(
    getattr(torch.ops.aten, name)
    for name in """
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    native_batch_norm native_batch_norm_backward native_layer_norm native_layer_norm_backward
    native_group_norm native_group_norm_backward
    """.split()
)


class LowSums(Emulation):
    """An emulation that accumulates in FP16, too."""

    def _run(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hooked = True  # so every backward pass runs inside it
        if reduces(func, args):
            with self:  # the sums inside are dispatched as operations
                return reduction(func, args, kwargs)
        if accumulates(func, args, kwargs):
            return product(*args)
        return super()._run(func, kind, args, kwargs)


@contextmanager
def in_trainers() -> Iterator[None]:
    """Trainers that are made inside and emulate FP16 accumulate in FP16."""
    with mock.patch("mpdiag.training.setup.Emulation", LowSums):
        yield


def accumulates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an ATen operation is a product of low-precision matrices."""
    low = all(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in args)
    return func.overloadpacket in _PRODUCTS and low and not kwargs


def product(*args: Tensor) -> Tensor:
    """The product of FP16 matrices, with an optional addend, accumulated in FP16.

    Args:
        args: Two matrices (…, M, K) and (…, K, N), or three tensors, of which the first is
            added at the end.
    """
    *added, a, b = args
    wide_a, wide_b = a.float(), b.float()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[-1], DEPTH):
        part = wide_a[..., k : k + DEPTH] @ wide_b[..., k : k + DEPTH, :]
        total = part.add_(total).to(a.dtype)
    return total + added[0] if added else total


def reduces(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an ATen operation sums elements of a tensor in FP16 or FP32."""
    held = func.overloadpacket in _MEANS or func.overloadpacket in _MADE_OF_SUMS
    return held and args[0].dtype in (torch.float16, torch.float32)


def reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that ``reduces``, with every sum in it accumulated in FP16.

    Call it where the sums inside a softmax or a normalization are dispatched as operations.
    """
    if func.overloadpacket in _MADE_OF_SUMS:
        return decomposition_table[func](*args, **kwargs)
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    x, keepdim = given["self"], given.get("keepdim", False)
    dims = (
        tuple(range(x.dim())) if not given.get("dim") else tuple(d % x.dim() for d in given["dim"])
    )
    count = math.prod(x.shape[d] for d in dims)
    dtype = given.get("dtype") or x.dtype
    if func.overloadpacket is torch.ops.aten.sum:
        return total(x, dims, keepdim).to(dtype)
    mean = total(x, dims, True) / count
    flat = mean if keepdim else mean.squeeze(dims)
    if func.overloadpacket is torch.ops.aten.mean:
        return flat.to(dtype)
    correction = given.get("correction")
    if correction is None:
        correction = int(given.get("unbiased", True))
    variance = total((x.float() - mean) ** 2, dims, keepdim) / (count - correction)
    return variance.to(dtype), flat.to(dtype)


def total(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The sum over dimensions, FP32 [the other dimensions], with elements added one by one in FP16.

    NumPy adds along the first of two axes in this way: row by row, rounding each sum.
    """
    others = [d for d in range(x.dim()) if d not in dims]
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim())]
    count = math.prod(x.shape[d] for d in dims)
    columns = (
        x.detach().permute((*dims, *others)).reshape(count, -1).to("cpu", torch.float16).numpy()
    )
    # NumPy would add a single column in pairs; with a second column it adds row by row.
    wide = np.repeat(columns, 2, axis=1) if columns.shape[1] == 1 else np.ascontiguousarray(columns)
    with np.errstate(over="ignore", invalid="ignore"):
        added = np.add.reduce(wide, axis=0, dtype=np.float16)[: columns.shape[1]]
    sums = torch.from_numpy(added.astype(np.float32)).to(x.device).reshape(shape)
    return sums if keepdim else sums.squeeze(dims)
