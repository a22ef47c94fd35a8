"""Gradients before the loop clips them, from the recorded operations.

A recorder sees weight gradients when the optimizer steps. A loop that clips has made them smaller by
then, and a loss scale multiplies what they were before. The steps whose operations were recorded show
both: what was multiplied in place after the last backward pass, and what came of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mpdiag.runs.operations import Operation

_SHRINKS = frozenset(("mul_", "_foreach_mul_", "div_", "_foreach_div_", "clamp_"))
_SMALLER = 0.999
"""A largest value below this share of what it was is one that was made smaller."""


@dataclass(frozen=True)
class Clipping:
    """What clipping hid.

    Attributes:
        largest: By step, the largest gradient before it was clipped.
        ratio: The largest ratio of a gradient's largest value before and after.
    """

    largest: dict[int, float]
    ratio: float = 1.0


def clipping(operations: Iterable[Operation]) -> Clipping:
    """The gradients that were made smaller between the backward pass and the optimizer's step."""
    largest: dict[int, float] = {}
    ratio = 1.0
    for operation in operations:
        if operation.phase != "update" or operation.op not in _SHRINKS:
            continue
        for before, after in zip(operation.inputs, operation.outputs, strict=False):
            alike = before.shape == after.shape and before.counted and after.counted
            if alike and before.shape and 0 < after.absmax < _SMALLER * before.absmax:
                largest[operation.step] = max(largest.get(operation.step, 0.0), before.absmax)
                ratio = max(ratio, before.absmax / after.absmax)
    return Clipping(largest, ratio)
