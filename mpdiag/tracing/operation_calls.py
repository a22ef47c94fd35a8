"""The calls of operations in a step: each ATen operation of a step, by its module and its number there.

Below autograd every operation of forward and backward passes by once, on plain tensors. A forward
operation belongs to the innermost module being called; a backward operation to the forward operation
whose gradient it computes, which autograd's sequence numbers tell. What activation checkpointing
computes again belongs to what it was the first time, as long as calls of one module come in the same
order again.

Meanwhile oneDNN is off above this level, as in ``emulation``: its LSTM would hide every gate.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpdiag.numerics.autocast_lists import LAYERS, LOW, OPERATIONS, policy_name
from mpdiag.tracing.dispatch import in_backward, tensors_of
from mpdiag.tracing.source_lines import ModuleCalls
from mpdiag.tracing.tap import FunctionTap, OperationTap

OUTSIDE = "(outside)"
"""Stands for the module of what is computed outside of all modules, such as a loss function."""

# What only moves or makes values: it rounds nothing that was not rounded before.
_MOVES = OPERATIONS["moves"]

# ATen's name below autograd -> the name above it, where policies and plans speak.
_PRODUCTS = {"addmm": "linear", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "dot": "matmul"}
_ABOVE = _PRODUCTS | LAYERS
_CONVOLUTIONS = {3: "conv1d", 4: "conv2d", 5: "conv3d"}


@dataclass(frozen=True, order=True)
class Site:
    """One call of one operation in a step.

    Attributes:
        module: The innermost module being called, as PyTorch names it; ``(outside)`` beyond all.
        op: The operation as policies and plans name it: ``softmax``, ``linear``, ``mul``.
        aten: The operation that ran: ``_softmax``, ``addmm``, ``mul``.
        index: Which call of ``aten`` in that module in this step, from 0.
    """

    module: str
    op: str
    aten: str
    index: int

    def __str__(self) -> str:
        return f"{self.module or '(model)'}: {self.op} #{self.index}"


class Sites:
    """A context that gives every operation that computes its ``Site``; subclasses act on it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._calls: ModuleCalls[Site] = ModuleCalls(
            {id(m): name for name, m in model.named_modules()}
        )
        self._function = ""  # of torch, that is being called: ``linear`` where ATen sees ``addmm``
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counts_again: Counter[tuple[str, str]] = Counter()
        self._contexts = ExitStack()
        self._onednn: bool | None = None

    def forward_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the forward pass."""
        del site
        return func(*args, **kwargs)

    def recomputed_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the forward pass again, for activation checkpointing."""
        del site
        return func(*args, **kwargs)

    def backward_operation(self, site: Site | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the backward pass; ``site`` is the forward operation's."""
        del site
        return func(*args, **kwargs)

    def forward(self) -> AbstractContextManager[None]:
        """A forward pass. Calls count from 0 again."""
        return self._forward()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._counts.clear()
        self._counts_again.clear()
        self._calls.forget()
        with self:
            yield

    def __enter__(self) -> Any:
        """Follow operations and module calls from here on."""
        self._calls.restart()
        for module in self._modules:
            before = module.register_forward_pre_hook(self._enter_module, prepend=True)
            after = module.register_forward_hook(self._leave_module, always_call=True)
            self._contexts.callback(before.remove)
            self._contexts.callback(after.remove)
        self._onednn = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        self._contexts.callback(torch._C._set_mkldnn_enabled, self._onednn)
        self._contexts.enter_context(FunctionTap(self))
        self._contexts.enter_context(OperationTap(self))
        return self

    def __exit__(self, *exception: object) -> None:
        """Follow them no more, and switch oneDNN back to what it was."""
        self._contexts.close()

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        self._calls.enter(module)

    def _leave_module(self, module: nn.Module, _args: Any, _output: Any) -> None:
        self._calls.leave(module)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note which function is being called."""
        before, self._function = self._function, _policy_name(func)
        try:
            return func(*args, **kwargs)
        finally:
            self._function = before

    def run(self, func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand an operation that computes to the method of its pass."""
        torch._C._set_mkldnn_enabled(bool(self._onednn))
        try:
            if not computes(func):
                return func(*args, **kwargs)
            node = self._calls.backward_node()
            if node is not None:
                return self.backward_operation(self._calls.noted(node), func, args, kwargs)
            again = in_backward()
            site = self._site_of(func, args, self._counts_again if again else self._counts)
            run = self.recomputed_operation if again else self.forward_operation
            return run(site, func, args, kwargs)
        finally:
            torch._C._set_mkldnn_enabled(False)

    def _site_of(self, func: Any, args: Any, counts: Counter[tuple[str, str]]) -> Site:
        aten = func.overloadpacket.__name__
        above = self._function
        if not above:
            above = _ABOVE.get(aten) or policy_name(aten)
            if aten == "convolution":
                above = _CONVOLUTIONS.get(args[0].dim(), above)
        module = OUTSIDE if self._calls.module is None else self._calls.module
        site = Site(module, above.removesuffix("_"), aten, counts[module, aten])
        counts[module, aten] += 1
        self._calls.note(site)
        return site


def _policy_name(func: Any) -> str:
    """The operation that autocast sees when this function is called; empty: look below."""
    name = str(getattr(func, "__name__", "")).strip("_")
    written_in_python = inspect.isfunction(func)
    if not name or not hasattr(torch.ops.aten, name):
        return ""
    if written_in_python and name not in LOW | {"rsub", "pow"}:
        return ""  # it calls others, which say more
    return name


def computes(func: Any) -> bool:
    """Whether an operation makes new values, and is no view and no mere copy."""
    if func.is_view or func.namespace != "aten":
        return False
    return func.overloadpacket.__name__ not in _MOVES


def floats(nest: Any) -> list[Tensor]:
    """The FP32 tensors of a nest, in order."""
    return [x for x in tensors_of(nest) if x.dtype == torch.float32]
