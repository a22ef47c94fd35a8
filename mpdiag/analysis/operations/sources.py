"""Which operations make a value narrow: the way back through a step's graph.

An operation in FP32 gives an FP32 result, and what follows it on no list of the policy stays FP32 with
it. So a value is kept wide where it was made narrow, and nowhere else.
"""

from collections.abc import Callable, Collection

from mpdiag.analysis.operations.graph import StepGraph, StoredStep, low_composite, stored_low
from mpdiag.numerics.autocast_lists import LISTS, policy_name
from mpdiag.runs.operations import Operation, TensorRecord

_DEPTH = 8
_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
_CARRIES = frozenset(
    """
    clone contiguous alias detach expand view reshape _unsafe_view slice select transpose permute
    squeeze unsqueeze new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like
    """.split()
)
"""What has the dtype of its input and computes nothing."""
_ONE_DTYPE = ("index_", "scatter_")
"""Beginnings of writes in place that refuse a source of another dtype."""


def is_product(op: Operation) -> bool:
    """Whether the policy casts what an operation reads to the low format."""
    return LISTS.get(policy_name(op.op)) == "low" or bool(low_composite(op))


def before_difference(
    step: StoredStep,
    operands: list[TensorRecord],
    error: float,
    wrong: float,
    felt: Callable[[Operation], bool | None],
) -> list[Operation]:
    """The operations whose rounding makes a difference wrong.

    Where it is known whether the loss feels an operation's rounding, it decides. Else small addends of a
    sum contribute small errors: a value whose rounding error is less than ``wrong`` of the result is not
    followed, and the way back ends at a product, unless rounding is larger than the whole difference:
    then that of the layers before is too large, too. It ends in any case at what both operands come
    from: that is rounded once, and the rounding cancels with the values.
    """
    found: dict[int, Operation] = {}
    size = max(t.absmax for t in operands)
    shared = _shared(step.graph, operands)
    beyond = error >= 1.0
    waiting = [(t, t.absmax, False) for t in operands]
    while waiting and (beyond or len(found) < _DEPTH):
        t, reaches, behind_product = waiting.pop()
        before = step.graph.producer(t)
        if before is None or before.node or before.index in found or not step.low[t.tensor]:
            continue
        known = felt(before)
        negligible = min(1.0, error) * reaches < wrong * size or (behind_product and not beyond)
        if before.index in shared or not (known or (known is None and not negligible)):
            continue
        found[before.index] = before
        behind = behind_product or is_product(before)
        for i in before.inputs:
            if i.counted:
                small = before.op in _SUMS and t.absmax > 0
                share = min(1.0, i.absmax / t.absmax) if small else 1.0
                waiting.append((i, reaches * share, behind))
    return list(found.values())


def _shared(graph: StepGraph, operands: list[TensorRecord]) -> Collection[int]:
    """The operations that all operands of a difference come from; none if there is one operand."""
    if len(operands) < 2:
        return ()
    return set.intersection(*(_ancestors(graph, t) for t in operands))


def _ancestors(graph: StepGraph, tensor: TensorRecord) -> set[int]:
    found: set[int] = set()
    waiting = [tensor]
    while waiting:
        made = graph.producer(waiting.pop())
        if made is not None and not made.node and made.index not in found:
            found.add(made.index)
            waiting += made.inputs
    return found


def written_in_place(step: StoredStep, op: Operation) -> list[Operation]:
    """What made the tensors narrow that an operation in place writes to; empty if it is none.

    Its own precision is that of the tensor. Where it refuses a source of another dtype, the source's
    makers are among them.
    """
    if op.node or not op.op.endswith("_") or not op.inputs:
        return []
    waiting = (
        [t for t in op.inputs if t.counted] if op.op.startswith(_ONE_DTYPE) else [op.inputs[0]]
    )
    found: dict[int, Operation] = {}
    while waiting:
        t = waiting.pop()
        made = step.graph.producer(t)
        if made is None or made.node or not step.low[t.tensor] or made.index in found:
            continue
        if made.op in _CARRIES or made.op.endswith("_"):
            waiting += made.inputs[:1]
        else:
            found[made.index] = made
    return list(found.values())


def without_followers(graph: StepGraph, needed: Collection[int]) -> frozenset[int]:
    """The operations among some in FP32 that would not be FP32 without being told to.

    Of a chain that is FP32 as a whole its first operation is enough, and every product.
    """
    kept = set(needed)
    for index in sorted(needed):
        op = graph.operations[index]
        if is_product(op) or op.node:
            continue
        low = stored_low(graph, policy=True, fp32=frozenset(kept - {index}))
        if not any(low[t.tensor] for t in (*op.inputs, *op.outputs)):
            kept.discard(index)
    return frozenset(kept)
