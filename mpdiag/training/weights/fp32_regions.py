"""Modules in FP32, operations in FP32 inside one module, and the casts around a whole model.

All by forward hooks, which are removed without a trace. None of them refers to a trainer: a model
that outlives its trainer, is pickled or sent to another process computes there as it does here, and
takes nothing else along. A deep copy of a model in half precision is of FP32 weights, without casts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from mpdiag.tracing.dispatch import in_backward
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.uncompiled import prepare, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from mpdiag.emulation.policy import Policy


class Switch:
    """Turns all hooks of a trainer off for a while (a replay in FP32)."""

    def __init__(self) -> None:
        self.on = True


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a nest in another dtype; float64 and integers stay."""

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in (*HALF, torch.float32) and x.dtype != dtype:
            return x.to(dtype)
        return x

    return tree_map(cast, value)


IN_FULL = object()
"""Stands in the memo of ``copy.deepcopy`` while a model is copied with FP32 weights."""


class _Shared:
    """A hook that belongs to its trainer: a copy of the model shares it, as it would a function."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


@dataclass(eq=False)
class _Fp32Module(_Shared):
    """Runs a module in FP32."""

    device_type: str
    back: torch.dtype | None
    switch: Switch
    entered: list[Any] = field(default_factory=list)

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.switch.on:
            return None
        context = torch.autocast(self.device_type, enabled=False)
        context.__enter__()
        self.entered.append(context)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self.entered:
            self.entered.pop().__exit__(None, None, None)
            if self.back is not None:
                return cast_floats(output, self.back)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fp32Module:
        if id(IN_FULL) in memo:
            return _Fp32Module(self.device_type, None, self.switch)
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.device_type, self.back, self.switch)


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
    hook = _Fp32Module(device_type, back, switch)
    return [
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
        module.register_forward_hook(hook.after, always_call=True),
    ]


@dataclass(eq=False)
class _Fp32Operations(_Shared):
    """Lets the policy run some operations in FP32 while a module is being called."""

    operations: frozenset[str]
    policy: Policy
    switch: Switch
    pushed: list[frozenset[str]] = field(default_factory=list)

    def before(self, _module: nn.Module, _args: Any) -> None:
        if self.switch.on:
            stack = self.policy.in_module
            outer = stack[-1] if stack else frozenset()
            self.pushed.append(outer | self.operations)
            stack.append(self.pushed[-1])

    def after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.pushed:
            self.pushed.pop()
            self.policy.in_module.pop()


def fp32_operations(
    module: nn.Module, operations: frozenset[str], policy: Policy, switch: Switch
) -> list[RemovableHandle]:
    """Let the policy run some operations in FP32 while a module is being called."""
    hook = _Fp32Operations(operations, policy, switch)
    return [
        module.register_forward_pre_hook(hook.before, prepend=True),
        module.register_forward_hook(hook.after, always_call=True),
    ]


@dataclass(eq=False)
class _Depth(_Shared):
    """Tells the policy while a submodule is being called."""

    policy: Policy
    switch: Switch
    entered: list[None] = field(default_factory=list)

    def before(self, _module: nn.Module, _args: Any) -> None:
        if self.switch.on:
            self.entered.append(None)
            self.policy.depth += 1

    def after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.entered:
            self.entered.pop()
            self.policy.depth -= 1


def count_depth(module: nn.Module, policy: Policy, switch: Switch) -> list[RemovableHandle]:
    """Tell the policy while a submodule is being called, for what is FP32 outside of all."""
    hook = _Depth(policy, switch)
    return [
        module.register_forward_pre_hook(hook.before, prepend=True),
        module.register_forward_hook(hook.after, always_call=True),
    ]


@dataclass(eq=False)
class _Boundary(_Shared):
    """Casts a model's inputs to its own precision and its outputs to FP32."""

    dtype: torch.dtype
    half_outputs: bool
    switch: Switch

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.switch.on:
            return None
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Boundary:
        """A copy of the model is FP32: see ``lookout.copy_in_full``."""
        off = Switch()
        off.on = False
        return _Boundary(self.dtype, self.half_outputs, off)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.switch.on:
            return None
        return cast_floats(output, self.dtype if self.half_outputs else torch.float32)


def cast_boundary(
    module: nn.Module, dtype: torch.dtype, switch: Switch, *, half_outputs: bool = False
) -> list[RemovableHandle]:
    """Cast a model's inputs to its own precision and its outputs to FP32, or leave these half."""
    hook = _Boundary(dtype, half_outputs, switch)
    return [
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
        module.register_forward_hook(hook.after),
    ]


@uncompiled("_notice")
class _BeforeForward:
    """Calls something before forward passes of a model; copies of the model call nothing."""

    def __init__(
        self,
        call: Callable[[], None] | None,
        look: Callable[[], None] | None = None,
        copied: Callable[[dict[int, Any]], None] | None = None,
    ) -> None:
        self._call = call
        self._look = look
        self._copied = copied

    def __call__(self, called: nn.Module, _args: Any) -> None:
        if self._call is not None:
            self._notice(self._call, called)

    def _notice(self, call: Callable[[], None], called: nn.Module) -> None:
        if in_backward():
            return
        if self._look is not None:
            self._look()
        if called.training or torch.is_grad_enabled():
            call()

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeForward:
        if self._copied is not None:
            self._copied(memo)
        return _BeforeForward(None)

    def __reduce__(self) -> Any:
        return _BeforeForward, (None,)


def before_forward(
    module: nn.Module,
    call: Callable[[], None],
    look: Callable[[], None] | None = None,
    copied: Callable[[dict[int, Any]], None] | None = None,
) -> RemovableHandle:
    """Call something before forward passes of a model.

    Args:
        module: The model.
        call: Called before each pass that may belong to a step.
        look: Called before every pass.
        copied: Called with the memo of ``copy.deepcopy`` while the model is copied, before most of it.
    """
    prepare()
    hook = _BeforeForward(call, look, copied)
    return module.register_forward_pre_hook(hook, prepend=True)
