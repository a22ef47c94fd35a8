"""Optimizer state in the dtype of the weights it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def follow_weights(optimizers: Sequence[Optimizer]) -> None:
    """Cast the state of each parameter to its dtype, as ``Optimizer.load_state_dict`` does.

    State from before the weights were cast would stay FP32 beside half-precision weights, which fused
    kernels refuse. Counters of steps stay as they are.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter.dtype in _CAST:
                for key in state:
                    if key != "step":
                        state[key] = _cast(state[key], parameter.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x

    return tree_map(cast, value)
