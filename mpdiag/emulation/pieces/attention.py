"""Emulated attention in one piece, and the batched products it is made of by hand (see ``kernels``).

A test compares the results bit by bit with those of the intercepted operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from mpdiag.emulation.mode import unwatched
from mpdiag.emulation.pieces import kernels

if TYPE_CHECKING:
    from torch.library import Library

    from mpdiag.emulation.mode import Emulation

_FLASH = SDPBackend.FLASH_ATTENTION.value
_aten: Any = torch.ops.aten
_forth = _aten._scaled_dot_product_flash_attention_for_cpu.default
_back = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def in_one_piece() -> Library:
    """What holds kernels that take emulated FP16 attention; they leave every other to torch."""
    return kernels.held(scaled_dot_product_attention=_attention, matmul=_matmul)


def _matmul(a: Tensor, b: Tensor) -> Tensor | None:
    mode = kernels.emulating(a, b)
    if mode is None or not _is_batched(a, b):
        return None
    with unwatched():
        # As torch's own: every dimension but the last two is one.
        flat = [t.reshape(-1, *t.shape[-2:]) for t in (a, b)]
        make: Any = Batched.apply if kernels.wants_gradient(a, b) else _product
        made: Tensor = make(*flat, mode)
        return made.view(*a.shape[:-1], b.shape[-1])


def _is_batched(a: Tensor, b: Tensor) -> bool:
    """Whether torch would run it as one ``bmm`` of as many matrices as both have."""
    return a.dim() == b.dim() >= 3 and a.shape[:-2] == b.shape[:-2] and 0 not in a.shape + b.shape


def _product(a: Tensor, b: Tensor, mode: Emulation) -> Tensor:
    """Batched products of FP16 values in FP32, rounded once; counted by their emulation."""
    mode.roundings += 1
    return torch.bmm(a.float(), b.float()).half()


class Batched(torch.autograd.Function):
    """a · b for each of a batch; its gradients are made by what torch makes those of ``bmm`` by."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mode: Emulation) -> Tensor:
        """The products; keeps what their gradients are made of."""
        ctx.save_for_backward(a, b)
        ctx.mode = mode
        return _product(a, b, mode)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of a and b, each rounded once."""
        a, b = (t.transpose(1, 2) for t in ctx.saved_tensors)
        wanted = ctx.needs_input_grad
        if kernels.is_watched():
            return (
                gradient.bmm(b) if wanted[0] else None,
                a.bmm(gradient) if wanted[1] else None,
                None,
            )
        ctx.mode.roundings += sum(wanted)
        with unwatched():
            wide = gradient.float()
            return (
                torch.bmm(wide, b.float()).half() if wanted[0] else None,
                torch.bmm(a.float(), wide).half() if wanted[1] else None,
                None,
            )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    mode = kernels.emulating(query, key, value)
    if mode is None or attn_mask is not None or dropout_p or enable_gqa:
        return None
    with unwatched():
        # Torch's own choice, by what it can do with these shapes and strides.
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale)
        if choice != _FLASH:
            return None
        mode.roundings += 1
        if kernels.wants_gradient(query, key, value):
            made: Tensor = Attention.apply(query, key, value, is_causal, scale, mode)  # type: ignore[no-untyped-call]
            return made
        out, _ = _attended(query, key, value, is_causal, scale)
        return out


def _attended(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of FP16 values in FP32, rounded once, and the FP32 logarithms of its sums."""
    wide = (t.float() for t in (query, key, value))
    out, sums = _forth(*wide, 0.0, is_causal, scale=scale)
    return out.half(), sums


class Attention(torch.autograd.Function):
    """Attention; differentiable once, as torch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float | None,
        mode: Emulation,
    ) -> Tensor:
        """Attention; keeps what its gradients are made of."""
        out, sums = _attended(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.how = is_causal, scale
        ctx.mode = mode
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value, each rounded once."""
        query, key, value, out, sums = ctx.saved_tensors
        given: tuple[Tensor, ...] = (gradient, query, key, value, out)
        is_causal, scale = ctx.how
        if kernels.is_watched():
            return (*_back(*given, sums, 0.0, is_causal, scale=scale), None, None, None)
        ctx.mode.roundings += 3
        with unwatched():
            wide = (t.float() for t in given)
            found = _back(*wide, sums, 0.0, is_causal, scale=scale)
            return (*(t.half() for t in found), None, None, None)
