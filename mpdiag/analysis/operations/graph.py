"""The operations of a step as a graph, and the precision each tensor would be stored in.

The recording is in FP32. Under the operation policy (level O1) matrix products store in the low
format, exponentials, sums and losses in FP32, and the rest stays as wide as its inputs; with no
policy (O2, O3) everything is stored in the low format. ``stored_low`` predicts this, operation by
operation, in the order of the recording.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mpdiag.analysis.operations.loss_change import NO_CURVE, LossChange, LossCurve, carriers, seeds
from mpdiag.numerics.autocast_lists import COMPOSITES, FP32, LISTS, policy_name
from mpdiag.numerics.formats import FloatFormat
from mpdiag.runs.operations import NONE, Operation, TensorRecord

_FLOATS = frozenset({"float16", "bfloat16", "float32"})
PASSING = frozenset(
    "clone _unsafe_view alias_copy copy_ contiguous constant_pad_nd add add_ cat dropout".split()
)
"""Operations whose results are values that they read, or sums of these."""
_COPIES = frozenset({"_unsafe_view", "alias_copy", "clone", "contiguous", "expand_copy"})
_SELECTING = frozenset(
    "threshold_backward hardtanh_backward where masked_fill masked_fill_".split()
)
# Composites whose parts run in FP32 and that no Python function of torch announces.
_COMPOSITE = re.compile(r"\b(cosine_similarity|rms_norm|kl_div|cdist|pdist|renorm)\s*\(")
_PARTS = frozenset({"mul", "bmm", "mm", "sum"})
FP32_LIMIT = 3.4028e38
"""A larger number is FP32's own limit: ``torch.finfo(x.dtype).min`` in the recording."""


@dataclass(frozen=True)
class Growth:
    """How much larger a tensor is in another step than it was when operations were recorded.

    Attributes:
        factor: That of its largest value.
        name: The layer or the parameter that has grown.
        step: The step.
    """

    factor: float
    name: str
    step: int


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The operations of one step.

    Attributes:
        operations: In order; ``operations[i].index == i``.
        curve: The losses of the training, where they were recorded.
        growth: Of tensors that are taken to be larger than they were, by number; see ``growth.py``.
    """

    operations: Sequence[Operation]
    curve: LossCurve = NO_CURVE
    growth: Mapping[int, Growth] = field(default_factory=dict)
    _figures: dict[tuple[str, int, str], int] = field(default_factory=dict, repr=False)

    @cached_property
    def readers(self) -> dict[int, list[Operation]]:
        """The forward operations that read each operation's results, by its index."""
        found: dict[int, list[Operation]] = defaultdict(list)
        for op in self.operations:
            if not op.node:
                for producer in {t.producer for t in op.inputs} - {NONE}:
                    found[producer].append(op)
        return found

    @cached_property
    def backward(self) -> dict[int, list[Operation]]:
        """The backward operations of each forward one, by its index."""
        found: dict[int, list[Operation]] = defaultdict(list)
        for op in self.operations:
            if op.node and op.forward != NONE:
                found[op.forward].append(op)
        return found

    @cached_property
    def loss_change(self) -> LossChange:
        """What errors of this step's results do to its loss."""
        return LossChange(self.operations, self.readers, self.backward, self.curve)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Tensors that carry the gradient of the loss: the loss scale multiplies these and no others."""
        carrying = carriers(self.operations, seeds(self.operations))
        return frozenset(t.tensor for i in carrying for t in self.operations[i].outputs)

    def producer(self, tensor: TensorRecord) -> Operation | None:
        """The operation that wrote a tensor, None where it came from outside the step."""
        return None if tensor.producer == NONE else self.operations[tensor.producer]

    @cached_property
    def data(self) -> frozenset[int]:
        """Tensors from outside the step that products read, and are no parameters: a batch."""
        return frozenset(
            t.tensor
            for op in self.operations
            if LISTS.get(policy_name(op.op)) == "low"
            for t in op.inputs
            if t.producer == NONE and not t.parameter
        )

    def computing(self, tensor: TensorRecord) -> Operation | None:
        """The operation that computed a tensor's values: copies are looked through."""
        op = self.producer(tensor)
        while op is not None and op.op in _COPIES and op.inputs:
            before = self.producer(op.inputs[0])
            if before is None or before.node:
                break
            op = before
        return op

    @cached_property
    def written(self) -> dict[int, Operation]:
        """The operation that wrote each tensor, by the tensor's number."""
        return {t.tensor: op for op in self.operations for t in op.outputs}

    def overflow(self, tensor: TensorRecord, target: FloatFormat) -> int:
        """How many of a tensor's values leave a format's range, at least."""
        if tensor.counted and tensor.tensor in self.growth:
            octaves = math.floor(math.log2(self.growth[tensor.tensor].factor))
            certain = int(tensor.histogram.overflow(target, octaves).lower)
            return max(certain, int(target.overflows(self.largest(tensor))))
        return self._figure("overflow", tensor, target)

    def largest(self, tensor: TensorRecord) -> float:
        """The largest |x| of a tensor."""
        growth = self.growth.get(tensor.tensor)
        return tensor.absmax * (1.0 if growth is None else growth.factor)

    def lost(self, tensor: TensorRecord, target: FloatFormat) -> int:
        """How many of a tensor's non-zero values a format makes 0, at least."""
        return self._figure("lost_to_zero", tensor, target)

    def _figure(self, what: str, tensor: TensorRecord, target: FloatFormat) -> int:
        """A figure of a histogram, cached because the rules need it repeatedly."""
        if not tensor.counted:
            return 0
        key = what, id(tensor), target.name
        known = self._figures.get(key)
        if known is None:
            known = self._figures[key] = int(getattr(tensor.histogram, what)(target).lower)
        return known

    def masked_softmax(self, tensor: TensorRecord, depth: int = 6) -> bool:
        """Whether a tensor is only read by softmax, with an unmasked entry in every row.

        There a value far below the range becomes minus infinity when stored, and gives the intended 0.
        The dtype's own lowest number stays finite in any dtype, so a whole row may be masked with it.
        """
        readers = self.readers.get(tensor.producer, [])
        if not readers or depth == 0:
            return False
        growth = self.growth.get(tensor.tensor)
        larger = 1.0 if growth is None else growth.factor
        for op in readers:
            if "lowest_row_maximum" in op.facts:
                lowest = op.facts["lowest_row_maximum"]
                highest = op.facts.get("highest", math.inf) * larger
                if -FP32_LIMIT < lowest <= -60000 / larger or highest >= 60000:
                    return False
            elif op.op not in PASSING or not all(
                self.masked_softmax(t, depth - 1) for t in op.outputs
            ):
                return False
        return True

    @cached_property
    def _backward_readers(self) -> dict[int, list[Operation]]:
        """The backward operations that read each tensor, by its number."""
        found: dict[int, list[Operation]] = defaultdict(list)
        for op in self.operations:
            if op.node:
                for number in {t.tensor for t in op.inputs}:
                    found[number].append(op)
        return found

    def differentiated(self, gradient: TensorRecord, sender: int) -> list[Operation]:
        """The forward operations whose results a gradient is of, it or a sum that it is part of.

        A gradient has the dtype of that result, whatever it was computed in.

        Args:
            gradient: What the backward pass of an operation wrote.
            sender: The index of that operation, whose own intermediates are left out.
        """
        found: dict[int, Operation] = {}
        waiting, seen = [gradient.tensor], set[int]()
        while waiting:
            number = waiting.pop()
            seen.add(number)
            for op in self._backward_readers.get(number, []):
                if op.forward == NONE and op.op in ("add", "add_"):
                    waiting += [t.tensor for t in op.outputs if t.tensor not in seen]
                elif op.forward not in (NONE, sender):
                    found[op.forward] = self.operations[op.forward]
        return list(found.values())

    def is_masked(self, gradient: TensorRecord, largest: float, depth: int = 6) -> bool:
        """Whether a gradient's values beyond a number reach nothing: ``relu`` passes on none of them.

        What selects values (and does not multiply by a mask, for 0 · ∞ is NaN) drops them.
        """
        readers = self._backward_readers.get(gradient.tensor, [])
        if not readers or depth == 0:
            return False
        for op in readers:
            selects = op.op in _SELECTING and all(t.absmax <= largest for t in op.outputs)
            adds = op.op in ("add", "add_")
            if not selects and not (
                adds and all(self.is_masked(t, largest, depth - 1) for t in op.outputs)
            ):
                return False
        return True

    @cached_property
    def followed(self) -> dict[int, int]:
        """For a mask converted to another tensor's dtype: the tensor it is combined with.

        ``scores + (1 - mask.to(scores.dtype)) * -1e9`` was recorded in FP32, but is FP16 if the
        scores are.
        """
        follows = ((op.index, int(op.facts.get("follows", NONE))) for op in self.operations)
        return {index: number for index, number in follows if number >= 0}


def split(operations: Iterable[Operation], curve: LossCurve = NO_CURVE) -> list[StepGraph]:
    """One graph per recorded step and rank."""
    steps: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for op in operations:
        steps[op.rank, op.step].append(op)
    return [
        _unscaled(StepGraph(found, curve), curve.scales.get(step, 1.0))
        for (_, step), found in steps.items()
    ]


def _unscaled(graph: StepGraph, scale: float) -> StepGraph:
    """A step as it is without the loss scale that its gradients were recorded with."""
    if scale == 1:
        return graph

    def without(tensors: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
        return tuple(
            # what fills a tensor with FP32's lowest number does so at any scale
            t.unscaled(scale) if t.tensor in graph.gradients and t.absmax < FP32_LIMIT else t
            for t in tensors
        )

    def facts(op: Operation) -> dict[str, Any]:
        return {k: v / scale if k.startswith("loss_change_") else v for k, v in op.facts.items()}

    operations = (
        replace(op, inputs=without(op.inputs), outputs=without(op.outputs), facts=facts(op))
        for op in graph.operations
    )
    return replace(graph, operations=list(operations))


def in_fp32(op: Operation) -> bool:
    """Whether the policy computes an operation in FP32, itself or as part of a composite."""
    if low_composite(op) or LISTS.get(policy_name(op.op)) == "low":
        return False
    composite = op.function in FP32 or bool(_COMPOSITE.search(op.code))
    return composite or policy_name(op.op) in FP32


def low_composite(op: Operation) -> str:
    """The function that autocast casts by its own name, and that an operation is part of; or none.

    ``einsum`` of an outer product is a ``mul`` to ATen.
    """
    if op.node or op.op not in _PARTS:
        return ""
    return op.function if op.function in COMPOSITES else ""


@dataclass(frozen=True, eq=False)
class StoredStep:
    """A recorded step, and what a training would store in a narrow format.

    Attributes:
        graph: The step.
        low: Whether each tensor is stored in the format, by its number.
        target: The format.
        policy: Whether the operation policy applies; otherwise everything is in the format.
    """

    graph: StepGraph
    low: Mapping[int, bool]
    target: FloatFormat
    policy: bool

    @property
    def forward(self) -> Iterator[Operation]:
        """The operations of the forward pass."""
        return (op for op in self.graph.operations if not op.node)


def store(
    graph: StepGraph, target: FloatFormat, *, policy: bool = True, fp32: frozenset[int]
) -> StoredStep:
    """A step stored in a format, but for some operations; see ``stored_low``."""
    return StoredStep(graph, stored_low(graph, policy=policy, fp32=fp32), target, policy)


def stored_low(
    graph: StepGraph, *, policy: bool, fp32: frozenset[int] = frozenset()
) -> dict[int, bool]:
    """Whether each tensor is stored in the low format, by its number.

    Args:
        graph: A recorded step.
        policy: Apply the operation policy; otherwise everything is low.
        fp32: Indices of operations that are kept in FP32 in addition.
    """
    low: dict[int, bool] = {}
    for op in graph.operations:
        for t in op.inputs:
            if t.tensor not in low:  # from outside, or part of a tensor written before
                whole = graph.producer(t)
                part = whole is not None and any(low.get(o.tensor, False) for o in whole.outputs)
                low[t.tensor] = t.counted and (part if whole is not None else not policy)
        if op.node:  # a backward operation has the precision of its forward one
            outputs = graph.operations[op.forward].outputs if op.forward != NONE else ()
            result = any(low.get(t.tensor, False) for t in outputs)
        else:
            result = _result_is_low(op, low, policy=policy, fp32=fp32)
            if op.index in graph.followed and op.index not in fp32:
                result = low.get(graph.followed[op.index], not policy)
        for t in op.outputs:
            low[t.tensor] = result and t.counted
    return low


def stored_itself(step: StoredStep, op: Operation) -> bool:
    """Whether an operation's result would be in the format if only what it reads were as it is."""
    return _result_is_low(op, dict(step.low), policy=step.policy, fp32=frozenset())


def _result_is_low(
    op: Operation, low: dict[int, bool], *, policy: bool, fp32: frozenset[int]
) -> bool:
    if op.index in fp32 or "wide" in op.facts:
        return False
    inputs = [t for t in op.inputs if t.dtype in _FLOATS]
    if op.op.endswith("_") and inputs:  # in place: the dtype stays
        return low[inputs[0].tensor]
    if policy and in_fp32(op):
        return False
    if policy and (LISTS.get(policy_name(op.op)) == "low" or low_composite(op)):
        return True
    if op.op.startswith(("native_batch_norm", "_native_batch_norm", "cudnn_batch_norm")):
        inputs = inputs[:1]  # its statistics and weights are FP32 for any input
    wide = [t for t in inputs if t.shape] or inputs  # numbers without dimensions do not promote
    if policy and op.op == "add" and op.module:
        # A linear layer in two operations: autocast casts its bias as it does its weight.
        wide = [t for t in wide if t.parameter != f"{op.module}.bias"] or wide
    if not wide:
        return not policy
    return all(low[t.tensor] for t in wide)
