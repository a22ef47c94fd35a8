"""What a thread is doing, and the arguments of the operations that it dispatches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


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
