"""What an operation costs: floating-point operations, bytes, and how long its reductions are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import flop_registry

from mpdiag.recording.tensors import tensors_in

if TYPE_CHECKING:
    import torch

_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot vdot".split())
_REDUCTIONS = frozenset(
    """
    sum mean prod norm linalg_vector_norm amax amin max min std var var_mean std_mean logsumexp
    nansum _softmax _log_softmax _safe_softmax mse_loss l1_loss smooth_l1_loss huber_loss
    nll_loss_forward nll_loss2d_forward binary_cross_entropy binary_cross_entropy_with_logits
    cumsum cumprod
    """.split()
)


def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, int]:
    """``flops``, ``bytes`` and ``reduction`` of an operation.

    FLOPs of matrix products, convolutions and attention as ``torch.utils.flop_counter`` counts
    them, one for each element read or written otherwise.
    """
    read = list(tensors_in([args, kwargs]))
    wrote = list(tensors_in(result))
    size = sum(_bytes(t) for t in read) + sum(_bytes(t) for t in wrote)
    elements = max([t.numel() for t in (*read, *wrote)], default=0)
    counter = flop_registry.get(func.overloadpacket)
    flops = elements
    if counter is not None:
        try:
            flops = int(counter(*args, **kwargs, out_val=result))
        except (TypeError, ValueError, AssertionError, IndexError):
            flops = elements  # an overload the counter does not know
    return {"flops": flops, "bytes": size, "reduction": _reduction(func, read, wrote, args)}


def _bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_nested else tensor.numel() * tensor.element_size()


def _reduction(
    func: Any, read: list[torch.Tensor], wrote: list[torch.Tensor], args: tuple[Any, ...]
) -> int:
    op = func.overloadpacket.__name__
    if not read or not wrote:
        return 1
    if op in _PRODUCTS:
        left = read[-2] if len(read) > 1 else read[0]
        return int(left.shape[-1]) if left.dim() else 1
    if op == "convolution" and len(read) > 1:
        return read[1].numel() // max(1, int(read[1].shape[0]))
    if op.rstrip("_") in _REDUCTIONS:
        if wrote[0].shape == read[0].shape:  # along one dimension, which stays
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            return int(read[0].shape[dim]) if read[0].dim() else 1
        return max(1, read[0].numel() // max(1, wrote[0].numel()))
    return 1
