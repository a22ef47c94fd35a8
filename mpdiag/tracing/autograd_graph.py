"""Which leaf tensors a backward pass will reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def leaves_of(tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """The leaf tensors that a backward pass from some tensors gives gradients to.

    Returns:
        Leaves by ``id``, and whether the graph holds operations written in Python (reentrant
        checkpointing, DDP): these may reach leaves that the graph does not show.
    """
    leaves: dict[int, Tensor] = {}
    opaque = False
    stack: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor.requires_grad:
            leaves[id(tensor)] = tensor
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
            continue
        opaque = opaque or isinstance(node, BackwardCFunction)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return leaves, opaque
