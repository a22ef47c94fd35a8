"""What infinite values lead to: the way forward through a step's graph.

An infinity is not always seen. A sum, a product or a norm passes it on, and the loss becomes infinite or
NaN; ``rsqrt`` and a division make 0 of it, and the training goes on with a wrong number; ``tanh`` makes
the same 1 of it as of the number that was too large. What is not known here is said to be so.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from mpdiag.analysis.operations.graph import FP32_LIMIT, StoredStep
from mpdiag.analysis.operations.loss_change import seeds
from mpdiag.numerics.autocast_lists import LISTS, OPERATIONS, policy_name
from mpdiag.runs.operations import Operation

SINGULAR = {
    "div": "other", "div_": "other", "reciprocal": "self", "rsqrt": "self", "rsqrt_": "self",
    "log": "self", "log2": "self", "log10": "self", "sqrt": "self", "sqrt_": "self",
}  # fmt: skip
"""The argument of an operation that must not be 0."""
_INVERTING = frozenset({"div", "div_", "reciprocal", "rsqrt", "rsqrt_"})
_BOUNDED, _SELECTING = OPERATIONS["bounded"], OPERATIONS["selecting"]
_MASKED = frozenset({"where", "masked_fill"})
"""Select by a mask. A backward pass may have another one in the format: of what became 0 there."""
_SPREADING, _MIXING = OPERATIONS["spreading"], OPERATIONS["mixing"]

Reaches = Literal["end", "gradients", "zeros", "alike", "unknown"]


@dataclass(frozen=True)
class Fate:
    """What infinite results lead to.

    Attributes:
        reaches: ``end``: the loss, or of a backward operation a parameter's gradient, is not finite;
            ``gradients``: the loss is finite, and gradients are not; ``zeros``: they become 0, and all
            stays finite; ``alike``: what reads them gives what it gave for the number recorded.
        by: What makes 0 of them; empty otherwise.
    """

    reaches: Reaches
    by: str = ""

    def of_values(self, many: str) -> str:
        """The consequence for a training, as a clause.

        Args:
            many: What becomes infinite, as a clause that ends with the verb.
        """
        return {
            "end": f"{many}, and the loss becomes NaN or Inf",
            "gradients": f"{many}, the gradients become NaN, and the step is skipped",
            "zeros": f"{many}, and {self.by} turns them into 0: the result is wrong, and no step is "
            "skipped",
        }.get(self.reaches, f"{many}: the result is wrong or NaN")

    def of_gradient(self, scale: float) -> str:
        """The same of a gradient that carries a loss scale; 1 where it carries none."""
        if self.reaches == "end":
            return (
                f"each of these steps is skipped{', and the loss scale falls' if scale > 1 else ''}"
            )
        if self.reaches == "zeros":
            return f"{self.by} turns it into 0: the gradient is wrong, and no step is skipped"
        return "the gradient is wrong, or the step is skipped"


State = Literal["recorded", "mixed", "other"]
"""Of infinite results: those too large in the recording, too; those of both signs, or NaN; others."""


def fate(step: StoredStep, start: Operation, scale: float = 1.0, *, read: bool = False) -> Fate:
    """What infinite results of an operation lead to; of a backward one, in the backward pass.

    Args:
        step: The step that it belongs to.
        start: The operation.
        scale: What the recorded values are multiplied by.
        read: Whether what it reads, and not its result, leaves the format's range.
    """
    backward = bool(start.node)
    readers: dict[int, list[Operation]] = defaultdict(list)
    for op in step.graph.operations:
        for producer in {t.producer for t in op.inputs}:
            readers[producer].append(op)
    losses = {t.producer for op in seeds(step.graph.operations) for t in op.inputs}
    infinite: dict[int, State] = {start.index: "mixed" if read else "recorded"}
    waiting = [start.index]
    met: dict[int, tuple[Reaches | State, Operation]] = {}
    while waiting:
        index = waiting.pop()
        reading = [op for op in readers[index] if bool(op.node) == backward]
        if index in losses or (backward and not reading):
            return Fate("end")
        for op in reading:
            found = _passed(step, op, infinite, scale)
            met[op.index] = found, op
            if _is_state(found) and op.index not in infinite:
                infinite[op.index] = found
                waiting.append(op.index)
    answers = [(found, op) for found, op in met.values() if not _is_state(found)]
    if not answers or any(found == "unknown" for found, _ in answers):
        return Fate("unknown")
    behind = [op for index in infinite for op in readers[index] if op.node]
    if not backward and any(_passed(step, op, infinite, scale) not in _FINITE for op in behind):
        return Fate("gradients")  # 0 · ∞ is NaN
    zero = next((op.op for found, op in answers if found == "zeros"), None)
    return Fate("alike") if zero is None else Fate("zeros", zero.rstrip("_"))


_FINITE = frozenset({"zeros", "alike"})


def _is_state(found: Reaches | State) -> TypeGuard[State]:
    return found in get_args(State)


def _passed(
    step: StoredStep, op: Operation, infinite: Mapping[int, State], scale: float
) -> Reaches | State:
    """What an operation makes of infinities that it reads, or which it passes on."""
    name, known, target = op.op.rstrip("_"), policy_name(op.op), step.target
    read = {t.argument for t in op.inputs if t.producer in infinite}
    states = {infinite[t.producer] for t in op.inputs if t.producer in infinite}
    graph = step.graph
    beyond = any(t.counted and target.overflows(graph.largest(t) * scale) for t in op.outputs)
    passed: State = "recorded" if beyond and states == {"recorded"} else "other"
    if "mixed" in states:
        passed = "mixed"
    exponent = op.scalars.get("exponent", 1)
    if op.op in _INVERTING or (name == "pow" and (not _is_number(exponent) or exponent < 0)):
        alone = read == {SINGULAR.get(op.op, "self")} and _is_number(exponent)
        return "zeros" if alone and states == {"recorded"} else "unknown" if alone else "mixed"
    if name in _BOUNDED:
        return "alike" if states == {"recorded"} else "unknown"
    if name in _SELECTING or "lowest_row_maximum" in op.facts:
        if "mixed" in states:
            return "mixed"
        if "other" in states or (name in _MASKED and op.node):
            return "unknown"
        if name in _SELECTING:
            return "recorded" if beyond else "alike"
        growth = graph.growth.get(op.inputs[0].tensor)
        larger = 1.0 if growth is None else growth.factor
        lowest = op.facts["lowest_row_maximum"] * larger
        nothing_left = lowest > -FP32_LIMIT and target.overflows(max(0.0, -lowest))  # in some row
        if target.overflows(max(0.0, op.facts.get("highest", math.inf)) * larger) or nothing_left:
            return "mixed"
        return "alike" if known == "softmax" else "unknown"
    if LISTS.get(known) == "low" or known in _MIXING:
        return "mixed"
    return passed if name == "pow" or known in _SPREADING else "unknown"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
