"""Backward passes that round as they should without being emulated.

Intercepting an operation costs what a small one does not. Nothing needs to be intercepted where every
formula of a backward pass makes its own roundings (``linear``, ``recurrent``), or rounds once in torch's
own kernels, or computes in FP32. Whether that is so is read from the graph, which must be of operations
that the emulation has seen in the forward pass before.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from mpdiag.emulation import linear, recurrent
from mpdiag.emulation.mode import Emulation
from mpdiag.numerics.autocast_lists import FP32, OPERATIONS
from mpdiag.tracing.precision import HALF

MOST = 400
"""Nodes of a graph that are looked at; in a larger one little is small."""

# Backward formulas that view, copy or cast, or compute by an operation that is exact natively.
_EXACT = OPERATIONS["exact_backward"]

# The same, but what was broadcast gets a sum, which is exact in FP32 alone.
_ELEMENTWISE = frozenset("AddBackward0 DivBackward0 MulBackward0 SubBackward0".split())

# Operations whose formulas compute in FP32 where all that they take and give is: those that the policy
# casts to FP32, and a few whose precision it leaves to their inputs.
_WIDE = frozenset(
    name.replace("_", "")
    for name in (FP32 - {"pow"}) | {"embedding", "gelu", "mean", "sigmoid", "silu", "tanh"}
)

_OWN = (linear.Linear._backward_cls, recurrent._Layer._backward_cls)


class Watch:
    """Knows since when what a forward pass has done was seen, for the backward pass after it.

    Args:
        emulation: What the forward passes run in.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._since: int | None = None
        self._hooks = 0

    def begin(self) -> None:
        """A forward pass begins; what was made before is not known any more."""
        self._emulation.hooked = False
        self._since = torch._C._autograd._get_sequence_nr()
        self._hooks = RemovableHandle.next_id

    def lets_go(self, loss: Tensor, *, create_graph: bool = False) -> bool:
        """Whether the backward pass of a loss has the same bits without the emulation."""
        return (
            self._since is not None
            and not create_graph
            and not self._emulation.hooked
            and self._hooks == RemovableHandle.next_id  # on tensors and nodes alike
            and loss.device.type == "cpu"
            and not torch._C._len_torch_dispatch_stack()
            and not (distributed.is_available() and distributed.is_initialized())
            and _rounds_itself(loss.grad_fn, self._since)
        )


def _rounds_itself(root: Any, since: int) -> bool:
    """Whether all nodes of a graph are known, and made no earlier than a sequence number says."""
    if root is None:
        return False
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        below = [edge for edge in node.next_functions if edge[0] is not None]
        if not _is_known(node, below, since):
            return False
        for to, _ in below:
            if to not in seen:
                seen.add(to)
                waiting.append(to)
        if len(seen) > MOST:
            return False
    return True


def _is_known(node: Any, below: list[tuple[Any, int]], since: int) -> bool:
    """Whether a formula rounds as it should by itself, where it was made late enough to be known."""
    kind, name = type(node), type(node).__name__
    if name == "AccumulateGrad":
        leaf = node.variable
        hooked = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        return leaf.dtype not in HALF or not hooked
    if node._sequence_nr() < since:
        return False
    if issubclass(kind, BackwardCFunction):
        return kind in _OWN
    if name in _EXACT:
        return True
    if name not in _ELEMENTWISE and not _is_wide(name):
        return False
    given, made = node._input_metadata, [to._input_metadata[i] for to, i in below]
    if name in _ELEMENTWISE and all(m.shape == given[0].shape for m in made):
        return True  # nothing was broadcast
    return HALF.isdisjoint(m.dtype for m in (*given, *made))


@lru_cache(maxsize=256)
def _is_wide(name: str) -> bool:
    """Whether ``NllLoss2DBackward0``, for one, computes in FP32 where all that it takes and gives is."""
    return name.rstrip("0123456789").removesuffix("Backward").lower() in _WIDE
