"""The value of a loss, as ``backward()`` is given it."""

from __future__ import annotations

from typing import Any

import torch


def loss_of(tensors: Any, weights: Any = None) -> float | torch.Tensor | None:
    """What a backward pass differentiates, as one number.

    Args:
        tensors: What ``torch.autograd.backward`` was called on: a tensor, or several.
        weights: Its ``grad_tensors``: None, a tensor, or one for each (None: 1).

    Returns:
        The sum of the tensors, each times its weight: a float, or a tensor on its device, which
        nobody waits for. None if one is no single number, or its value cannot be read.
    """
    given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors or ())
    factors = (weights,) if weights is None or isinstance(weights, torch.Tensor) else tuple(weights)
    if factors == (None,):
        factors *= len(given)
    if not given or len(factors) != len(given):
        return None
    if not all(_is_readable(t) for t in (*given, *(f for f in factors if f is not None))):
        return None
    try:
        with torch.no_grad():
            parts = [_product(t, f) for t, f in zip(given, factors, strict=True)]
            return sum(parts[1:], parts[0])
    except RuntimeError:  # a tensor of torch.func, whose value cannot be read
        return None


def _is_readable(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor or tensor.numel() != 1 or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _product(tensor: torch.Tensor, weight: torch.Tensor | None) -> float | torch.Tensor:
    value = _value(tensor)
    return value if weight is None else value * _value(weight)


def _value(tensor: torch.Tensor) -> float | torch.Tensor:
    value = tensor.detach()
    return value.item() if value.device.type == "cpu" else value.clone()
