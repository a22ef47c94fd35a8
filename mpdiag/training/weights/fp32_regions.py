"""Modules in FP32, operations in FP32 inside one module, and the casts around a whole model.

All are forward hooks, which are removed without a trace. None of them refers to a trainer: a model
that outlives its trainer, is pickled or sent to another process computes there as it does here, and
takes nothing else along. A deep copy of a model in half precision is of FP32 weights, without casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from mpdiag.emulation.policy import Policy
from mpdiag.errors import UsageError
from mpdiag.tracing.precision import HALF


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

    kind = type(value)  # what most models are called with; torch's own walk takes ten times as long
    if kind is torch.Tensor:
        return cast(value)
    if kind is tuple:
        return tuple([cast_floats(one, dtype) for one in value])
    if kind is dict:
        return {name: cast_floats(one, dtype) for name, one in value.items()}
    return tree_map(cast, value)


IN_FULL = object()
"""Stands in the memo of ``copy.deepcopy`` while a model is copied with FP32 weights."""


class Around:
    """Hooks around the calls of a module; a copy of the model shares them, as it would a function.

    Attributes:
        takes_keywords: Whether ``_enter`` sees arguments by keyword.
        always: Whether ``_leave`` is called after an error, too.
    """

    takes_keywords: ClassVar[bool] = False
    always: ClassVar[bool] = True
    _enter: Callable[..., Any]
    _leave: Callable[..., Any]

    def place(self, module: nn.Module) -> list[RemovableHandle]:
        """Place them on a module.

        Raises:
            UsageError: If it is of TorchScript.
        """
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                "a TorchScript module takes no hooks, so the plan can keep nothing in it in FP32: train "
                "the eager model and script it afterwards, or take it out of the plan's FP32 choices"
            )
        return [
            module.register_forward_pre_hook(
                self._enter, prepend=True, with_kwargs=self.takes_keywords
            ),
            module.register_forward_hook(self._leave, always_call=self.always),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Around:
        return self


@dataclass(eq=False)
class Fp32Module(Around):
    """Runs a module in FP32: inputs widened, autocast off inside.

    Attributes:
        device_type: Whose autocast to switch off.
        back: The dtype its outputs are cast to; None leaves them in FP32.
        switch: Off: the hooks do nothing.
    """

    takes_keywords = True

    device_type: str
    back: torch.dtype | None
    switch: Switch
    entered: list[Any] = field(default_factory=list)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.switch.on:
            return None
        context = torch.autocast(self.device_type, enabled=False)
        context.__enter__()
        self.entered.append(context)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self.entered:
            self.entered.pop().__exit__(None, None, None)
            if self.back is not None:
                return cast_floats(output, self.back)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp32Module:
        if id(IN_FULL) in memo:
            return Fp32Module(self.device_type, None, self.switch)
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.device_type, self.back, self.switch)


@dataclass(eq=False)
class Fp32Operations(Around):
    """Lets the policy run some operations in FP32 while a module is being called."""

    operations: frozenset[str]
    policy: Policy
    switch: Switch
    pushed: list[frozenset[str]] = field(default_factory=list)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        if self.switch.on:
            stack = self.policy.in_module
            outer = stack[-1] if stack else frozenset()
            self.pushed.append(outer | self.operations)
            stack.append(self.pushed[-1])

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.pushed:
            self.pushed.pop()
            self.policy.in_module.pop()


@dataclass(eq=False)
class Depth(Around):
    """Tells the policy while a submodule is being called, for what is FP32 outside of all."""

    policy: Policy
    switch: Switch
    entered: list[None] = field(default_factory=list)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        if self.switch.on:
            self.entered.append(None)
            self.policy.depth += 1

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.entered:
            self.entered.pop()
            self.policy.depth -= 1


@dataclass(eq=False)
class Boundary(Around):
    """Casts a model's inputs to its own precision and its outputs to FP32, or leaves these half."""

    takes_keywords = True
    always = False

    dtype: torch.dtype
    half_outputs: bool
    switch: Switch

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.switch.on:
            return None
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        """A copy of the model is FP32: see ``lookout.copy_in_full``."""
        off = Switch()
        off.on = False
        return Boundary(self.dtype, self.half_outputs, off)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.switch.on:
            return None
        return cast_floats(output, self.dtype if self.half_outputs else torch.float32)
