"""What the operations of a recorded step would hold once layers have grown as other steps show.

Operations are recorded in a few steps, the largest value of each layer in every recorded one. Where a
layer or a parameter is larger in another step, what reads it is larger, too, and a square by the square.
Growth is estimated from one layer to the next: what a layer puts out was measured. It is the growth of
largest values. That of a square of one tensor is exact, that of a sum or a product is an upper bound.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from mpdiag.analysis.layers import LargestValue, LargestValues
from mpdiag.analysis.operations.graph import Growth, StepGraph
from mpdiag.analysis.operations.layer_effects import LayerEffects
from mpdiag.analysis.operations.rules import located
from mpdiag.numerics.formats import FloatFormat
from mpdiag.runs.operations import Operation, TensorRecord

_PRODUCTS = {
    "mul": (), "mm": (), "bmm": (), "mv": (), "dot": (), "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"), "convolution": ("input", "weight"),
    "_convolution": ("input", "weight"), "linear": ("input", "weight"),
}  # fmt: skip
"""Products, with the names of their factors; () where all that they read is one."""
_POWERS = {"square": 2.0, "var": 2.0, "mse_loss": 2.0, "sqrt": 0.5}
_SUMS = frozenset({"add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "copy"})
_PASSING = frozenset(
    """
    neg abs relu leaky_relu gelu silu elu softplus sum mean amax max min cumsum clone index
    index_select select gather embedding dropout native_dropout linalg_vector_norm norm std
    constant_pad_nd expand repeat roll flip avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d
    upsample_nearest2d upsample_bilinear2d clamp_min
    """.split()
)
_EXPONENTIALS = frozenset({"exp", "expm1", "sinh", "cosh"})
_MOST = 2.0**200
TRENDED = 4.0
"""How many times larger a value may become by a trend: as far as a layer may before it is looked at."""
LEAST = 4
"""Recorded steps from which there is a trend; of the first one nothing has been learnt yet."""


def grown(graph: StepGraph, sizes: LargestValues, target: FloatFormat) -> StepGraph | None:
    """A recorded step as it would be with each layer as large as it became.

    Args:
        graph: The step.
        sizes: The largest values of the recording.
        target: The format that values may leave.

    Returns:
        None where no value of the forward pass leaves the format's range that does not in the step.
    """
    if not graph.operations or all(
        _growth(known, graph) is None
        for known in (*sizes.layers.values(), *sizes.parameters.values())
    ):
        return None
    found = {number: growth for number, growth in _growths(graph, sizes) if growth.factor > 1.0}
    later = replace(graph, growth=found, _figures={})
    beyond = any(
        target.overflows(later.largest(t)) and not target.overflows(t.absmax)
        for op in graph.operations
        if not op.node
        for t in (*op.inputs, *op.outputs)
        if t.counted and t.tensor in found
    )
    return later if beyond else None


def trended(graphs: Sequence[StepGraph], last: int, target: FloatFormat) -> StepGraph | None:
    """The last of some recorded steps as it would be later, if its values go on growing as they did.

    Operations that no layer puts out grow unseen: a sum that a loop carries from step to step, what is
    divided by a temperature that falls. Continued is the slower growth of the last three steps, and at
    most ``TRENDED`` times.

    Args:
        graphs: Recorded steps, in order.
        last: The step up to which it goes on.
        target: The format that values may leave.

    Returns:
        None where no value of the forward pass leaves the format's range that does not in the step.
    """
    if len(graphs) < LEAST or len({tuple(o.op for o in g.operations) for g in graphs[-3:]}) > 1:
        return None
    steps = [g.operations[0].step for g in graphs[-3:]]
    growth: dict[int, Growth] = {}
    for calls in zip(*(g.operations for g in graphs[-3:]), strict=True):
        for t, *after in zip(*(op.outputs for op in calls), strict=False):
            sizes = [o.absmax for o in (t, *after) if o.counted]
            if calls[0].node or len(sizes) < 3 or not 0 < sizes[0] < sizes[1] < sizes[2]:
                continue
            rate = min(
                math.log(b / a) / (j - i)
                for (a, b), (i, j) in zip(pairwise(sizes), pairwise(steps), strict=True)
            )
            factor = min(TRENDED, math.exp(rate * max(0, last - steps[2])))
            if target.overflows(factor * sizes[2]) and not target.overflows(sizes[2]):
                made = located(calls[2].op, None, "")
                growth[after[-1].tensor] = Growth(factor, f"the result of {made}", last)
    return replace(graphs[-1], growth=growth, _figures={}) if growth else None


def _growth(known: LargestValue, graph: StepGraph) -> Growth | None:
    """By how much a value is larger in another step than in this one; None where it is not known."""
    before = known.seen.get(graph.operations[0].step, 0.0)
    if not 0.0 < before < known.size:
        return None
    return Growth(known.size / before, "", known.step)


def _growths(graph: StepGraph, sizes: LargestValues) -> Iterator[tuple[int, Growth]]:
    """The growth of every tensor of the forward pass that has any, by the tensor's number."""
    made = _measured(graph, sizes)
    most = _limits(graph, made)
    known: dict[int, Growth] = {}
    for op in graph.operations:
        if op.node:
            continue
        known |= dict(_of_what_is_read(op, graph, sizes, known))
        result = made[op.index] if op.index in made else _of_result(op, known)
        for t in op.outputs:
            known.pop(t.tensor, None)
            if result is not None and t.counted:
                limit = math.inf if op.index in made else most.get(t.tensor, math.inf)
                known[t.tensor] = replace(result, factor=min(result.factor, limit))
    yield from known.items()


def _limits(graph: StepGraph, made: Mapping[int, Growth | None]) -> dict[int, float]:
    """By how much tensors can have grown that a product of a layer reads, by number.

    By more than its result has, and the result would have grown by more, too.
    """
    found: dict[int, float] = {}
    for index, growth in made.items():
        op = graph.operations[index]
        for t in op.inputs if op.op in _PRODUCTS else ():
            factor = 1.0 if growth is None else growth.factor
            found[t.tensor] = min(factor, found.get(t.tensor, math.inf))
    return found


def _of_what_is_read(
    op: Operation, graph: StepGraph, sizes: LargestValues, known: Mapping[int, Growth]
) -> Iterator[tuple[int, Growth]]:
    """The growth of the parameters that an operation reads, and of parts of what was computed."""
    for t in op.inputs:
        parameter = sizes.parameters.get(t.parameter) if t.parameter else None
        growth = None if parameter is None else _growth(parameter, graph)
        if growth is not None:
            yield t.tensor, replace(growth, name=t.parameter)
        elif t.tensor not in known and (whole := graph.producer(t)) is not None:
            yield from ((t.tensor, known[o.tensor]) for o in whole.outputs if o.tensor in known)


def _measured(graph: StepGraph, sizes: LargestValues) -> dict[int, Growth | None]:
    """The growth of what leaves a layer, by the index of the operation that computes it."""
    layers, found = LayerEffects(graph), dict[int, Growth | None]()
    step = graph.operations[0].step
    for name in sorted(sizes.layers, key=len):  # of nested ones the innermost last
        value = sizes.layers[name]
        if not value.seen.get(step):
            continue
        growth = _growth(value, graph)
        for op in layers.made(name):
            found[op.index] = None if growth is None else replace(growth, name=name)
    return found


def _of_result(op: Operation, known: Mapping[int, Growth]) -> Growth | None:
    """The growth of a result by that of what is read; None where there is none, or it is not known."""
    read = [t for t in op.inputs if t.counted]
    growths = [known[t.tensor] for t in read if t.tensor in known]
    if not growths:
        return None
    most = max(growths, key=lambda g: g.factor)
    factor = min(_factor(op, read, known, most.factor), _MOST)
    return replace(most, factor=factor) if factor > 1.0 else None


def _factor(
    op: Operation, read: list[TensorRecord], known: Mapping[int, Growth], most: float
) -> float:
    name = op.op.rstrip("_")

    def of(t: TensorRecord) -> float:
        return known[t.tensor].factor if t.tensor in known else 1.0

    if name in _PRODUCTS:
        factors = _PRODUCTS[name]
        return math.prod(of(t) for t in read if not factors or t.argument in factors)
    if name == "pow":
        exponent = op.scalars.get("exponent")
        return most ** float(exponent) if isinstance(exponent, int | float) else 1.0
    if name == "div":
        below = [of(t) for t in read if t.argument == "other"]
        return math.prod(of(t) for t in read if t.argument != "other") / max(below, default=1.0)
    if name in _SUMS:
        whole = sum(of(t) * t.absmax for t in read)
        size = max((t.absmax for t in op.outputs if t.counted), default=0.0)
        return min(most, whole / size) if size else 1.0
    if name in _EXPONENTIALS:
        highest = float(op.facts.get("highest", 0.0))
        return math.exp(min(highest * (most - 1.0), math.log(_MOST))) if highest > 0 else 1.0
    if name in _POWERS:
        return float(most ** _POWERS[name])
    return most if name in _PASSING else 1.0
