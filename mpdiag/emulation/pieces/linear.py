"""An emulated linear layer in one piece (see ``kernels``).

A test compares the results bit by bit with those of the intercepted operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdiag.emulation.mode import unwatched
from mpdiag.emulation.pieces import kernels

if TYPE_CHECKING:
    from torch.library import Library

    from mpdiag.emulation.mode import Emulation


def in_one_piece() -> Library:
    """What holds a kernel that takes emulated FP16 linear layers; it leaves every other to torch."""
    return kernels.held(linear=_linear)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    mode = kernels.emulating(x, weight) if bias is None else kernels.emulating(x, weight, bias)
    if mode is None or not _applies(x, weight, bias):
        return None
    mode.roundings += 2 if _adds(x, bias) else 1
    with unwatched():
        if kernels.wants_gradient(x, weight, bias):
            made: Tensor = Linear.apply(x, weight, bias, mode)  # type: ignore[no-untyped-call]
            return made
        return _product(x, weight, bias)


def _applies(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch would run it as one product of plain matrices, whose gradients are products."""
    return (
        (x.is_contiguous() if x.dim() == 2 else x.dim() == 3 and _is_folded(x, weight))
        and weight.dim() == 2
        and weight.is_contiguous()
        and min(*weight.shape, *x.shape) > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or (bias.dim() == 1 and len(bias) == len(weight)))
    )


def _is_folded(x: Tensor, weight: Tensor) -> bool:
    """Whether torch makes one matrix of (…, …, features), by a copy if it must."""
    return x.is_contiguous() or weight.requires_grad


def _adds(x: Tensor, bias: Tensor | None) -> bool:
    """Whether torch adds the bias to a rounded product, as where features had to be copied."""
    return bias is not None and not x.is_contiguous()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias of FP16 values in FP32, rounded once; or product and sum, each rounded."""
    flat, across = x.reshape(-1, x.shape[-1]).float(), weight.float().t()
    if bias is None or _adds(x, bias):
        out = torch.mm(flat, across).half()
        if bias is not None:
            out.add_(bias)  # torch's own rounds once
    else:
        out = torch.addmm(bias.float(), flat, across).half()
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


class Linear(torch.autograd.Function):
    """x · weightᵀ + bias; its gradients are made by what torch makes those of its product by."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: Emulation
    ) -> Tensor:
        """The product; keeps what its gradients are made of."""
        ctx.save_for_backward(x, weight)
        ctx.mode = mode
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, each rounded once."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        columns = x.reshape(-1, x.shape[-1])
        if kernels.is_watched():
            return (
                flat.mm(weight).view(x.shape) if wanted[0] else None,
                flat.t().mm(columns) if wanted[1] else None,
                flat.sum(0, keepdim=True).view(-1) if wanted[2] else None,
                None,
            )
        ctx.mode.roundings += sum(wanted)
        with unwatched():
            wide = flat.float()
            across = wide.t() if flat.is_contiguous() else flat.t().float()
            return (
                torch.mm(wide, weight.float()).half().view(x.shape) if wanted[0] else None,
                torch.mm(across, columns.float()).half() if wanted[1] else None,
                wide.sum(0, keepdim=True).half().view(-1) if wanted[2] else None,
                None,
            )
