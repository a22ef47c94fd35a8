"""Dispatch modes: their stack, and the arguments of the operations they see."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils._python_dispatch import TorchDispatchMode


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (where checkpointing runs forwards again)."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward pass that this thread is inside is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_traced() -> bool:
    """Whether a call is being compiled or traced (``torch.jit.trace``), and our own code with it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def compiler_in_use() -> bool:
    """Whether anything in this process is compiled; under a dispatch mode it would run eagerly."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(frames, "cached_backends", {})  # of what only disables the compiler: None
    return any(backend is not None for backend in known.values())


def push_lowest(mode: TorchDispatchMode) -> bool:
    """Put a mode under all others; False where a compiler traces (its modes must stay alone)."""
    depth = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(i) for i in range(depth)]
    if mode in stack:
        return True
    if any(getattr(m, "_mode_key", None) is not None for m in stack):
        return False
    for _ in stack:
        torch._C._pop_torch_dispatch_stack(None)
    for m in (mode, *stack):
        torch._C._push_on_torch_dispatch_stack(m)
    return True


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, wherever it lies."""
    depth = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(i) for i in range(depth)]
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in (mode, *above):
        torch._C._pop_torch_dispatch_stack(None)
    for m in above:
        torch._C._push_on_torch_dispatch_stack(m)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in an operation's argument or result."""
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments by the names of its schema."""
    names = [a.name for a in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an operation writes to in place."""
    named = by_name(func, args, kwargs)
    return [
        t
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for t in tensors_of(named.get(a.name))
    ]
