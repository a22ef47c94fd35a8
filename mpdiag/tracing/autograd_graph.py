"""What a backward pass begins with, and what it will reach: a loss, leaf tensors, operations."""

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction

_AUTOGRAD: Any = torch.autograd  # its backward() and grad() look the engine up by this name


def loss_of(tensors: Any, weights: Any = None) -> float | torch.Tensor | None:
    """What a backward pass differentiates, as one number.

    Args:
        tensors: What ``torch.autograd.backward`` was called on: a tensor, or several.
        weights: Its ``grad_tensors``: None, a tensor, or one for each (None: 1).

    Returns:
        The sum of the tensors, each times its weight: a float, or a tensor on its device, which
        nobody waits for. None if one is no single number, or its value cannot be read.
    """
    given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors or ())
    factors = (weights,) if weights is None or isinstance(weights, torch.Tensor) else tuple(weights)
    if factors == (None,):
        factors *= len(given)
    if not given or len(factors) != len(given):
        return None
    if not all(_is_readable(t) for t in (*given, *(f for f in factors if f is not None))):
        return None
    try:
        with torch.no_grad():
            pairs = zip(given, factors, strict=True)
            parts = [_value(t) if f is None else _value(t) * _value(f) for t, f in pairs]
            return sum(parts[1:], parts[0])
    except RuntimeError:  # a tensor of torch.func, whose value cannot be read
        return None


def _is_readable(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor or tensor.numel() != 1 or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _value(tensor: torch.Tensor) -> float | torch.Tensor:
    value = tensor.detach()
    return value.item() if value.device.type == "cpu" else value.clone()


def leaves_of(tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """The leaf tensors that a backward pass from some tensors gives gradients to.

    Returns:
        Leaves by ``id``, and whether the graph holds operations written in Python (reentrant
        checkpointing, DDP): these may reach leaves that the graph does not show.
    """
    leaves: dict[int, Tensor] = {}
    opaque = False
    roots = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            roots.append(tensor.grad_fn)
        elif tensor.requires_grad:
            leaves[id(tensor)] = tensor
    for node in nodes_behind(roots):
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        opaque = opaque or isinstance(node, BackwardCFunction)
    return leaves, opaque


def holds_any(outputs: Iterable[Any], operations: Container[str]) -> bool:
    """Whether a backward pass from some outputs runs the backward of one of these operations.

    Args:
        outputs: Tensors, or edges of the graph.
        operations: Names of nodes, with or (for all overloads) without number: ``ProdBackward``.
    """
    roots = (getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs)
    for node in nodes_behind(root for root in roots if root is not None):
        name = node.name()
        if name in operations or name.rstrip("0123456789") in operations:
            return True
    return False


def nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of a graph that a backward pass from some of them runs, each once."""
    stack = list(roots)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        fresh = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= fresh
        stack.extend(fresh)


class BackwardPasses:
    """Puts a context around each backward pass of the process, however it is asked for.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` look the engine's
    function up where it is replaced here, also where a script has imported them by name before.

    Args:
        around: Makes the context, from the outputs where the pass begins.
    """

    def __init__(self, around: Callable[[Iterable[Any]], AbstractContextManager[None]]) -> None:
        self._around = around
        self._plain: Any = None
        self._wrapped: Any = None

    def attach(self) -> None:
        """Begin; a second call does nothing."""
        if self._wrapped is not None:
            return
        plain = _AUTOGRAD._engine_run_backward

        @_disable_dynamo
        @functools.wraps(plain)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wrapped is not run:  # detached, and wrapped by somebody else since
                return plain(outputs, *args, **kwargs)
            with self._around(outputs):
                return plain(outputs, *args, **kwargs)

        self._plain, self._wrapped = plain, run
        _AUTOGRAD._engine_run_backward = run

    def detach(self) -> None:
        """End; torch's function is put back, unless it has been wrapped again since."""
        if _AUTOGRAD._engine_run_backward is self._wrapped:
            _AUTOGRAD._engine_run_backward = self._plain
        self._plain = self._wrapped = None
