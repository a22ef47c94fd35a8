"""An emulated linear layer in one piece: the same roundings, without intercepting each operation.

A linear layer with its gradients is some fifteen small operations, most of them views and casts. In a
small model intercepting one costs more than running it: a step of an MLP of 128 units takes 1.2 times
as long without this and ``backward``. A test compares the results bit by bit with those of the
intercepted operations.

It is so where nothing else looks on: another dispatch mode, hooks on saved tensors, functorch and
forward-mode differentiation find the operations as they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.library import Library

from mpdiag.emulation.mode import alone, unwatched
from mpdiag.emulation.recurrent import held_kernel
from mpdiag.tracing.uncompiled import CAN_HIDE, compiler_looks_on, hide, unseen

_KINDS = frozenset({Tensor, torch.nn.Parameter})
_torchs = torch.ops.aten.linear.default._op_dk


def in_one_piece() -> Library:
    """What holds a kernel that takes emulated FP16 linear layers; it leaves every other to torch."""
    return held_kernel("linear", _kernel if CAN_HIDE else _disable_dynamo(_kernel))


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # What all models of the process compute in FP32 comes here, too.
    if x.dtype is torch.float16:
        given = x, weight, bias
        out = unseen(_linear, *given) if compiler_looks_on() else _linear(*given)
        if out is not None:
            return out
    # Not ``decompose``, as with an LSTM.
    return _torchs(torch._C.DispatchKey.CompositeImplicitAutograd, x, weight, bias)


hide(_kernel)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    if not _is_emulated(x, weight, bias) or not _applies(x, weight, bias):
        return None
    wanted = any(t is not None and t.requires_grad for t in (x, weight, bias))
    with unwatched():
        if wanted and torch.is_grad_enabled():
            out: Tensor = Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            return out
        return _product(x, weight, bias)


def _is_emulated(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether an emulation is all that sees an operation on plain FP16 tensors of one device."""
    return (
        alone() is not None
        and forward_ad._current_level < 0
        and all(
            type(t) in _KINDS and t.dtype is torch.float16 and t.device == x.device
            for t in (x, weight, bias)
            if t is not None
        )
        and not torch._C._are_functorch_transforms_active()
    )


def _is_watched() -> bool:
    """Whether a backward pass must be made of operations: others see them, or differentiate them."""
    return torch.is_grad_enabled() or (torch._C._len_torch_dispatch_stack() > 0 and alone() is None)


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product; keeps what its gradients are made of."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, each rounded once."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        columns = x.reshape(-1, x.shape[-1])
        if _is_watched():
            return (
                flat.mm(weight).view(x.shape) if wanted[0] else None,
                flat.t().mm(columns) if wanted[1] else None,
                flat.sum(0, keepdim=True).view(-1) if wanted[2] else None,
            )
        with unwatched():
            wide = flat.float()
            across = wide.t() if flat.is_contiguous() else flat.t().float()
            return (
                torch.mm(wide, weight.float()).half().view(x.shape) if wanted[0] else None,
                torch.mm(across, columns.float()).half() if wanted[1] else None,
                wide.sum(0, keepdim=True).half().view(-1) if wanted[2] else None,
            )
