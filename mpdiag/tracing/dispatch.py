"""What a thread is doing, and the arguments of the operations that it dispatches."""

import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

import torch

from mpdiag.tracing.capture import is_captured

_REHEARSALS = frozenset(
    {"_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference"}
)
"""Methods of torch's pipeline stages that run a stage on uninitialised memory to learn its shapes."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (where checkpointing runs forwards again)."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward pass that this thread is inside is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_traced() -> bool:
    """Whether a call is being compiled or traced (``torch.jit.trace``), and our own code with it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_dynamo_tracing() -> bool:
    """Whether torch's compiler traces a call, or an export does."""
    return torch.compiler.is_dynamo_compiling()


def is_hidden() -> bool:
    """Whether a call is traced, or captured in a CUDA graph: then it is no part of the training yet.

    A replay of a captured count would write where its row was, which holds something else by then.
    """
    return is_traced() or is_captured()


def compiler_in_use() -> bool:
    """Whether anything in this process is compiled; under a dispatch mode it would run eagerly."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(frames, "cached_backends", {})  # of what only disables the compiler: None
    return any(backend is not None for backend in known.values())


_PLAIN = frozenset({int, float, bool, str, type(None), torch.device, torch.Size})
"""Arguments that hold no tensor: to ask each whether it is one costs more than all else."""
_Leaf = TypeVar("_Leaf")


def mapped(
    thing: Any, kind: type[Any] | tuple[type[Any], ...], change: Callable[[Any], Any]
) -> Any:
    """An operation's arguments or results with all of one kind changed, in order.

    Torch's own walk (``torch.utils._pytree``) takes ten times as long.

    Args:
        thing: Lists, tuples and names of values, as ATen knows them.
        kind: What to change.
        change: From one to what takes its place.
    """
    what = type(thing)
    if what in _PLAIN:
        return thing
    if isinstance(thing, kind):
        return change(thing)
    if what is dict:
        return {name: mapped(one, kind, change) for name, one in thing.items()}
    if what is list:
        return [mapped(one, kind, change) for one in thing]
    return tuple([mapped(o, kind, change) for o in thing]) if isinstance(thing, tuple) else thing


def found_in(thing: Any, kind: type[_Leaf], into: list[_Leaf] | None = None) -> list[_Leaf]:
    """All of one kind in an operation's arguments or results, in order, added to a list."""
    found: list[_Leaf] = [] if into is None else into
    if isinstance(thing, (tuple, list, dict)):
        for one in thing.values() if isinstance(thing, dict) else thing:
            if type(one) not in _PLAIN:
                found_in(one, kind, found)
    elif isinstance(thing, kind):
        found.append(thing)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in an operation's argument or result."""
    return found_in(value, torch.Tensor)


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments by the names of its schema."""
    return {**dict(zip(_names(func)[0], args, strict=False)), **kwargs}


@lru_cache(maxsize=4096)
def _names(func: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of an operation's schema, and those that it writes to."""
    arguments = func._schema.arguments
    own = tuple(a.name for a in arguments if is_written(func, a))
    return tuple(a.name for a in arguments), own


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an operation writes to in place."""
    own = _names(func)[1]
    named = by_name(func, args, kwargs) if own else {}
    return [t for name in own for t in tensors_of(named.get(name))]


def is_written(func: Any, argument: Any) -> bool:
    """Whether an operation writes to an argument of its schema.

    Batch normalisation (``native_batch_norm``, ``cudnn_batch_norm``, ``batch_norm_gather_stats`` …)
    writes to its running statistics, and its schema does not say so.
    """
    if argument.alias_info is not None:
        return bool(argument.alias_info.is_write)
    name = func.overloadpacket.__name__
    return argument.name in ("running_mean", "running_var") and not name.endswith(
        ("backward", "functional")
    )


def in_rehearsal() -> bool:
    """Whether a pipeline stage is only learning its shapes here."""
    if "torch.distributed.pipelining" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _REHEARSALS and "pipelining" in code.co_filename:
            return True
        frame = frame.f_back
    return False
