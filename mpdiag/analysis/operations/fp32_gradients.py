"""Which gradients stay FP32 in a training by a plan: those limit no loss scale, and need none.

The gradient of a tensor has the tensor's dtype. It passes through the format also where the operation
that reads the tensor casts it, as a matrix product does. What is FP32 and only read by operations in
FP32 has a gradient that no format's range touches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from mpdiag.analysis.operations.graph import PASSING, StepGraph, stored_low
from mpdiag.analysis.operations.layer_effects import within
from mpdiag.analysis.operations.sources import is_product
from mpdiag.runs.operations import NONE, Operation


def fp32_gradients(
    graphs: Iterable[StepGraph], parameters: Mapping[str, int], kept: Callable[[Operation], bool]
) -> frozenset[str]:
    """The modules whose outputs' gradients, and the parameters whose gradients, stay FP32.

    Args:
        graphs: The recorded steps.
        parameters: Elements of each parameter, by its name.
        kept: What the plan keeps in FP32 beyond the operation policy.

    Returns:
        Names of both; none of what no recorded step shows.
    """
    wide: set[str] = set()
    cast: set[str] = set()
    for graph in graphs:
        fp32 = frozenset(op.index for op in graph.operations if not op.node and kept(op))
        low = stored_low(graph, policy=True, fp32=fp32)
        for found in (_outputs(graph, low), _weights(graph, low, parameters)):
            for name, is_cast in found:
                (cast if is_cast else wide).add(name)
    return frozenset(wide - cast)


def _outputs(graph: StepGraph, low: Mapping[int, bool]) -> Iterator[tuple[str, bool]]:
    """Each module that hands out a tensor, and whether the format holds it or a reader casts it."""
    casts = _casts(graph, low)
    for op in _forward(graph):
        readers = graph.readers.get(op.index, [])
        for name in _around(op.module):
            outside = [r for r in readers if not within(r.module, name)]
            if outside or not readers:
                yield name, _stores_low(op, low) or any(r.index in casts for r in outside)


_HANDS_ON = PASSING | {"relu", "stack", "sub", "native_dropout", "index_select", "unsafe_split"}
"""Operations whose inputs have the gradients of their results, or parts of these."""


def _casts(graph: StepGraph, low: Mapping[int, bool]) -> frozenset[int]:
    """The operations that read through the format, or hand on what another one reads so."""
    found: set[int] = set()
    for op in reversed([*_forward(graph)]):
        after = graph.readers.get(op.index, []) if op.op in _HANDS_ON else []
        if _stores_low(op, low) or any(r.index in found for r in after):
            found.add(op.index)
    return frozenset(found)


def _weights(
    graph: StepGraph, low: Mapping[int, bool], parameters: Mapping[str, int]
) -> Iterator[tuple[str, bool]]:
    """Each parameter that a step shows, and whether an operation that may read it casts it.

    A product reads a weight transposed, which has no name: any of as many elements may be it. A
    module that multiplies in the format has all its parameters cast, as recurrent layers do.
    """
    outside = [(t, op) for op in _forward(graph) for t in op.inputs if t.producer == NONE]
    cast = [t for t, op in outside if _stores_low(op, low)]
    named, unnamed = {t.parameter for t in cast}, {t.numel for t in cast if not t.parameter}
    products = {op.module for op in _forward(graph) if is_product(op) and _stores_low(op, low)}
    shown = {op.module for _, op in outside} | {t.parameter for t, _ in outside}
    for name, numel in parameters.items():
        module = name.rpartition(".")[0]
        if name in shown or module in shown:
            yield name, name in named or module in products or numel in unnamed


def _forward(graph: StepGraph) -> Iterator[Operation]:
    return (op for op in graph.operations if op.phase == "forward")


def _stores_low(op: Operation, low: Mapping[int, bool]) -> bool:
    return any(low[t.tensor] for t in op.outputs)


def _around(module: str | None) -> Iterator[str]:
    """A module and those that it is in."""
    if module is None:
        return
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
