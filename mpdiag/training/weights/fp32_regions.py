"""Modules in FP32, operations in FP32 inside one module, and the casts around a whole model.

All are forward hooks, which are removed without a trace. None of them refers to a trainer: a model
that outlives its trainer, is pickled or sent to another process computes there as it does here, and
takes nothing else along. A deep copy of a model in half precision is of FP32 weights, without casts.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from mpdiag.emulation.policy import Policy
from mpdiag.errors import UsageError
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.uncompiled import Eagerly, compiler_looks_on, hide, unseen


class Switch:
    """Turns all hooks of a trainer off for a while (a replay in FP32)."""

    def __init__(self) -> None:
        self.on = True


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a nest in another dtype; float64 and integers stay.

    Traced inside a graph, it is a part of it; it makes none of its own.
    """
    if not torch.compiler.is_compiling() and compiler_looks_on():
        return unseen(_cast_floats, value, dtype)
    return _cast_floats(value, dtype)


hide(cast_floats)


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in (*HALF, torch.float32) and x.dtype != dtype:
            return x.to(dtype)
        return x

    kind = type(value)  # what most models are called with; torch's own walk takes ten times as long
    if kind is torch.Tensor:
        return cast(value)
    if kind is tuple:
        return tuple([_cast_floats(one, dtype) for one in value])
    if kind is dict:
        return {name: _cast_floats(one, dtype) for name, one in value.items()}
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Around":
        return self

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)  # type: ignore[arg-type]


class Region(Around):
    """What holds from the beginning of a module's call to its end, in compiled code as well.

    Hooks are traced into the graph. There a number stands for the region, and casts are made by what
    ``enter_region`` does while the compiler runs the graph on its fake tensors.
    """

    switch: Switch

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _regions[self.number] = self

    def place(self, module: nn.Module) -> list[RemovableHandle]:
        """Place the hooks on a module.

        Raises:
            UsageError: If it is of TorchScript.
        """
        torch.compiler.allow_in_graph([enter_region, leave_region])
        return super().place(module)

    def begin(self) -> None:
        """The call begins."""
        raise NotImplementedError

    def end(self) -> None:
        """The call is over, or was never begun."""
        raise NotImplementedError


_numbers = itertools.count()
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def enter_region(number: int) -> None:
    """Begin a region."""
    if number in _regions:
        _regions[number].begin()


def leave_region(number: int) -> None:
    """End a region."""
    if number in _regions:
        _regions[number].end()


@dataclass(eq=False)
class Fp32Module(Region):
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
    around: list[bool] = field(default_factory=list, init=False)

    def begin(self) -> None:
        """Switch autocast off."""
        self.around.append(torch.is_autocast_enabled(self.device_type))
        torch.set_autocast_enabled(self.device_type, False)

    def end(self) -> None:
        """Autocast is as it was."""
        if self.around:
            torch.set_autocast_enabled(self.device_type, self.around.pop())

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.switch.on:
            return None
        enter_region(self.number)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.switch.on:
            return None
        leave_region(self.number)
        return None if self.back is None else cast_floats(output, self.back)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fp32Module":
        if id(IN_FULL) in memo:
            return Fp32Module(self.device_type, None, self.switch)
        return self


@dataclass(eq=False)
class Fp32Operations(Region):
    """Lets the policy run some operations in FP32 while a module is being called.

    Where its call is not traced, what is compiled inside runs eagerly: nothing would tell a graph made
    here from one made where these operations are not FP32.

    Attributes:
        operations: Which ones; none: the policy learns only that a submodule is being called.
        tell: Told of a module that runs eagerly for that reason.
    """

    operations: frozenset[str]
    policy: Policy
    switch: Switch
    begun: list[Eagerly | None] = field(default_factory=list, init=False)
    tell: Callable[[nn.Module], None] | None = field(default=None, init=False)

    def begin(self) -> None:
        """The operations are FP32."""
        self.policy.enter(self.operations, submodule=not self.operations)
        alone = self.operations and TracingContext.try_get() is None
        eagerly = Eagerly() if alone else None
        if eagerly is not None:
            eagerly.__enter__()
        self.begun.append(eagerly)

    def end(self) -> None:
        """The policy is as it was."""
        if self.begun:
            self.policy.leave()
            eagerly = self.begun.pop()
            if eagerly is not None:
                eagerly.__exit__()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if self.switch.on:
            enter_region(self.number)
            if not torch.compiler.is_compiling() and self.tell is not None:
                begun = self.begun[-1] if self.begun else None
                if begun is not None and begun.matters:
                    self.tell(module)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.switch.on:
            leave_region(self.number)


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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Boundary":
        """A copy of the model is FP32: see ``lookout.copy_in_full``."""
        off = Switch()
        off.on = False
        return Boundary(self.dtype, self.half_outputs, off)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.switch.on:
            return None
        return cast_floats(output, self.dtype if self.half_outputs else torch.float32)


for _kind in (Fp32Module, Fp32Operations, Boundary):
    for _hook in ("_enter", "_leave", "begin", "end"):
        if hasattr(_kind, _hook):
            hide(getattr(_kind, _hook))
for _function in (enter_region, leave_region, Policy.enter, Policy.leave):
    hide(_function)
