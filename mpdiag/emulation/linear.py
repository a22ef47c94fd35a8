"""An emulated linear layer in one function: the same roundings, without intercepting each operation.

Forward and backward of a layer are some fifteen small operations, most of them views and casts. In a
small model intercepting one costs more than running it. Here they run unseen; a test compares the
results bit by bit with those of the intercepted operations.

It is used where nothing else looks on: another dispatch mode, hooks on saved tensors (checkpointing
compares what two forward passes save), functorch and forward-mode differentiation find the operations
as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.library import Library

from mpdiag.emulation.mode import Emulation, saved_tensors_are_hooked
from mpdiag.tracing.uncompiled import CAN_HIDE, hide, unseen

_KINDS = frozenset({Tensor, torch.nn.Parameter})
_KEY = "AutogradCPU"
_held: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def in_one_piece() -> Library:
    """What holds a kernel that takes emulated FP16 linear layers; it leaves every other to torch.

    It is in force, in the whole process, until nobody holds it.
    """
    library = _held.get(_KEY)
    if library is None:
        library = _held[_KEY] = Library("aten", "IMPL")
        kernel = _linear_or_torch if CAN_HIDE else _disable_dynamo(_linear_or_torch)
        library.impl("linear", kernel, _KEY)
    return library


# Not ``decompose``, as with an LSTM.
_torchs = torch.ops.aten.linear.default._op_dk
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _linear_or_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # All FP32 layers of the process come here, too.
    if weight.dtype is not torch.float16:
        return _torchs(_COMPOSITE, x, weight, bias)
    return unseen(_of_halves, x, weight, bias)


hide(_linear_or_torch)


def _of_halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    mode = _alone()
    if mode is None or bias is None or not _applies(x, weight, bias):
        return _torchs(_COMPOSITE, x, weight, bias)
    mode.roundings += 1
    with mode.around():
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias)):
            return Linear.apply(x, weight, bias, mode)  # type: ignore[no-untyped-call]
        return _product(x, weight, bias)


def _alone() -> Emulation | None:
    """The emulation that is the only thing to see this thread's operations, if there is one."""
    if torch._C._len_torch_dispatch_stack() != 1:
        return None
    mode = torch._C._get_dispatch_stack_at(0)
    return mode if isinstance(mode, Emulation) and not mode.low_sums else None


def _applies(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether torch would run it as one ``addmm`` of plain matrices, whose gradients are products."""
    return (
        {type(x), type(weight), type(bias)} <= _KINDS
        and x.dtype is bias.dtype is torch.float16
        and x.dim() in (2, 3)
        and weight.dim() == 2
        and bias.dim() == 1
        and x.is_contiguous()
        and weight.is_contiguous()
        and min(*weight.shape, *x.shape) > 1
        and x.shape[-1] == weight.shape[1]
        and len(bias) == len(weight)
        and x.device == weight.device == bias.device
        and not saved_tensors_are_hooked()
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x · weightᵀ + bias of FP16 values in FP32, rounded once."""
    flat = x.reshape(-1, x.shape[-1]).float()
    out = torch.addmm(bias.float(), flat, weight.float().t()).half()
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


class Linear(torch.autograd.Function):
    """x · weightᵀ + bias; its gradients are made by what torch makes those of ``addmm`` by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mode: Emulation) -> Tensor:
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
        if torch.is_grad_enabled() or (torch._C._len_torch_dispatch_stack() and _alone() is None):
            # Seen, and differentiable once more.
            return (
                flat.mm(weight).view(x.shape) if wanted[0] else None,
                flat.t().mm(columns) if wanted[1] else None,
                flat.sum(0, keepdim=True).view(-1) if wanted[2] else None,
                None,
            )
        mode: Emulation = ctx.mode
        mode.roundings += sum(wanted)
        with mode.around():
            wide = flat.float()
            across = wide.t() if flat.is_contiguous() else flat.t().float()
            return (
                torch.mm(wide, weight.float()).half().view(x.shape) if wanted[0] else None,
                torch.mm(across, columns.float()).half() if wanted[1] else None,
                wide.sum(0, keepdim=True).half().view(-1) if wanted[2] else None,
                None,
            )
