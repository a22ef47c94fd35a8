"""Products that a script computes with a model's parameters outside a call of the model.

``model.forward(x)``, another method, or ``F.linear(x, model.weight)`` pass no hook of a module. A mode
of ``torch.overrides`` sees them: a product is cast where one of its operands is a parameter (or a view
of one), or where the code of a model computes it. Inside a call of a model the mode is off, for
autocast is on there.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._guards import CompileContext
from torch.overrides import _push_mode

from mpdiag.numerics.autocast_lists import LOW
from mpdiag.tracing.tap import FunctionTap
from mpdiag.tracing.uncompiled import uncompiled

_PRODUCTS = (LOW - {"convolution"}) | {
    "__matmul__", "__rmatmul__", "multi_head_attention_forward", "bilinear", "tensordot",
}  # fmt: skip
_FRAMES = 24  # how far up a model's method is looked for


class ProductHandler(Protocol):
    """Casts products of known models."""

    def owner(self, parameter: torch.Tensor) -> nn.Module | None:
        """The module that holds a parameter of a known model."""

    def met(self, parameter: torch.Tensor) -> None:
        """A parameter of no known model is computed with."""

    def is_known(self, module: nn.Module) -> bool:
        """Whether a module belongs to a known model."""

    def compute(
        self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Compute a product of this module, cast by the plan."""


@uncompiled("_product")
class ParameterOperations:
    """Shows the products of known models to a handler; on from ``attach`` to ``detach``."""

    def __init__(self, handler: ProductHandler) -> None:
        self._handler = handler
        self._looking = True
        self._tap = FunctionTap(self)

    def attach(self) -> None:
        """Look at this thread's functions, below every mode that the script leaves later."""
        self._tap.attach()

    def detach(self) -> None:
        """Look at this thread's functions no more."""
        self._tap.detach()

    @contextmanager
    def backward_pass(self, _outputs: Iterable[Any]) -> Iterator[None]:
        """Look inside a backward pass, too: checkpointing computes parts of a model in it again.

        ``loss.backward()`` is passed to the mode, and torch takes it off for what it was passed.
        """
        if not self._looking or self._tap.is_attached:
            yield
            return
        self.attach()
        try:
            yield
        finally:
            self.detach()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Look at nothing here, at no cost where the mode is the topmost one."""
        on_top = self._tap.is_topmost
        before, self._looking = self._looking, False
        if on_top:
            self._tap.detach()
        try:
            yield
        finally:
            self._looking = before
            if on_top:
                _push_mode(self._tap)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast a product of a known model; call all else as it is."""
        product = self._looking and getattr(func, "__name__", "") in _PRODUCTS
        if product and "out" not in kwargs and torch._C._get_tracing_state() is None:
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiling = CompileContext.try_get() is not None  # a compiler runs a graph on fake tensors
        module = None if compiling else self._module(args, kwargs)
        if module is None:
            return func(*args, **kwargs)
        return self._handler.compute(module, func, args, kwargs)

    def _module(self, args: Any, kwargs: Mapping[str, Any]) -> nn.Module | None:
        """The module a product belongs to: that of its parameter, or the one whose code it is."""
        for value in (*args, *kwargs.values()):
            for tensor in value if type(value) in (tuple, list) else (value,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                held = tensor if tensor._base is None else tensor._base
                if isinstance(held, torch.nn.Parameter) and self._handler.owner(held) is None:
                    self._handler.met(held)
                module = self._handler.owner(held)
                if module is not None:
                    return module
        return self._calling_module()

    def _calling_module(self) -> nn.Module | None:
        """The known model whose method calls a product, if one does."""
        frame: FrameType | None = sys._getframe(5)
        for _ in range(_FRAMES):
            if frame is None:
                return None
            if frame.f_code.co_varnames[:1] == ("self",):
                first: Any = frame.f_locals.get("self")
                if issubclass(type(first), torch.nn.Module) and self._handler.is_known(first):
                    return cast("nn.Module", first)
            frame = frame.f_back
        return None
