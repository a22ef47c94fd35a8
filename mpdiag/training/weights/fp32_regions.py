"""Modules in FP32, operations in FP32 inside one module, and the casts around a whole model.

All by forward hooks, which are removed without a trace. None of them refers to a trainer: a model
that outlives its trainer, is copied for an average of weights or is sent to another process takes
only plain functions along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from mpdiag.tracing.dispatch import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from mpdiag.emulation.policy import Policy

_LOW = (torch.float16, torch.bfloat16)


class Switch:
    """Turns all hooks of a trainer off for a while (a replay in FP32)."""

    def __init__(self) -> None:
        self.on = True


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a nest in another dtype; float64 and integers stay."""

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in (*_LOW, torch.float32) and x.dtype != dtype:
            return x.to(dtype)
        return x

    return tree_map(cast, value)


def fp32_module(
    module: nn.Module, device_type: str, back: torch.dtype | None, switch: Switch
) -> list[RemovableHandle]:
    """Run a module in FP32: inputs widened, autocast off inside.

    Args:
        module: The module.
        device_type: Whose autocast to switch off.
        back: The dtype its outputs are cast to; None leaves them in FP32.
        switch: Off: the hooks do nothing.
    """
    entered: list[Any] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not switch.on:
            return None
        context = torch.autocast(device_type, enabled=False)
        context.__enter__()
        entered.append(context)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if entered:
            entered.pop().__exit__(None, None, None)
            if back is not None:
                return cast_floats(output, back)
        return None

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]


def fp32_operations(
    module: nn.Module, operations: frozenset[str], policy: Policy, switch: Switch
) -> list[RemovableHandle]:
    """Let the policy run some operations in FP32 while a module is being called."""
    pushed: list[frozenset[str]] = []

    def before(_module: nn.Module, _args: Any) -> None:
        if switch.on:
            outer = policy.in_module[-1] if policy.in_module else frozenset()
            pushed.append(outer | operations)
            policy.in_module.append(pushed[-1])

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if pushed:
            pushed.pop()
            policy.in_module.pop()

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


def count_depth(module: nn.Module, policy: Policy, switch: Switch) -> list[RemovableHandle]:
    """Tell the policy while a submodule is being called, for what is FP32 outside of all."""
    entered: list[None] = []

    def before(_module: nn.Module, _args: Any) -> None:
        if switch.on:
            entered.append(None)
            policy.depth += 1

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if entered:
            entered.pop()
            policy.depth -= 1

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


def cast_boundary(module: nn.Module, dtype: torch.dtype, switch: Switch) -> list[RemovableHandle]:
    """Cast a model's inputs to its own precision and its outputs to FP32."""

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not switch.on:
            return None
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return cast_floats(output, torch.float32) if switch.on else None
    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def before_forward(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call something before each training forward pass of a model."""

    def before(called: nn.Module, _args: Any) -> None:
        if called.training and not in_backward():
            call()

    hook = torch.compiler.disable(before)
    return module.register_forward_pre_hook(hook, prepend=True)

