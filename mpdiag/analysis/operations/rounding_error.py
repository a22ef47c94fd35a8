"""The relative error of each recorded operation's results if they were stored in a narrow format.

It follows from exponent histograms alone: a value that becomes 0 is off by itself; a value that is kept
is off by a rounding error, which is practically uniform over the format's spacing there and has the
mean square spacing² / 12. It does not say how much the loss depends on a result; measurements
(``mpdiag.measure_sensitivity``) and trainings (``mpdiag.search_fp32``) do.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.numerics.autocast_lists import policy_name
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram, stack
from mpdiag.runs.operations import NONE, Operation

# Operations that pass on values that were rounded before, or create none.
_MOVES = frozenset(
    """
    _to_copy alias_copy cat clone constant_pad_nd contiguous copy_ detach empty_like expand_copy
    fill_ index index_select new_zeros ones_like repeat slice_backward select_backward stack
    zero_ zeros_like unbind_copy gather scatter
    """.split()
)


@dataclass(frozen=True)
class OperationError:
    """One operation of one module on one line, all its recorded calls together.

    Attributes:
        module: Name, "" for the model itself, None outside the models.
        op: As the plan names it.
        where, text: The user's line; empty where it is not known.
        calls: Recorded, in all steps.
        forward, backward: Largest relative error of a result, ‖rounded − x‖ / ‖x‖, in the forward
            and the backward pass; infinite where a value leaves the format's range.
    """

    module: str | None
    op: str
    where: str
    text: str
    calls: int
    forward: float
    backward: float

    @property
    def worst(self) -> float:
        """The larger of the forward and the backward error."""
        return max(self.forward, self.backward)


def rounding_error(
    h: ExponentHistogram, fmt: FloatFormat, exponent: int = 0
) -> NDArray[np.float64]:
    """Relative error of storing values in a format, for each histogram of a stack.

    Args:
        h: Of batch shape (n,).
        fmt: The format.
        exponent: log2 of the scale of the values.

    Returns:
        (n,): ‖rounded − x‖ / ‖x‖, an estimate; infinite where a value overflows, 0 where there are
        no non-zero values.
    """
    zero = fmt.zero_exponent - exponent
    spacing = np.maximum(h.exponents, fmt.min_exponent - exponent) - fmt.mantissa_bits
    kept = np.where(h.exponents >= zero, h.counts, 0)
    moved = (kept * np.exp2(2.0 * spacing) / 12).sum(-1) + h.energy(zero).value
    whole = h.energy().value
    with np.errstate(invalid="ignore", divide="ignore"):
        found: NDArray[np.float64] = np.where(whole > 0, np.sqrt(moved / whole), 0.0)
    found = np.minimum(found, 1.0)
    return np.where(h.overflow(fmt, exponent).lower > 0, math.inf, found)


def operation_errors(
    operations: Sequence[Operation], fmt: FloatFormat, exponent: int
) -> tuple[OperationError, ...]:
    """The rounding errors of recorded operations, the largest first.

    Args:
        operations: Operations of any steps and ranks, as ``Run.operations`` reads them.
        fmt: The format.
        exponent: log2 of the loss scale, which gradients carry.
    """
    forward_of = {(op.rank, op.step, op.index): op for op in operations}
    places: list[tuple[tuple[Any, ...], bool]] = []
    histograms: list[ExponentHistogram] = []
    calls: Counter[tuple[Any, ...]] = Counter()
    texts: dict[tuple[Any, ...], str] = {}
    for op in operations:
        backward = bool(op.node)
        owner = forward_of.get((op.rank, op.step, op.forward)) if op.forward != NONE else op
        if op.phase == "update" or op.op in _MOVES or owner is None or owner.op in _MOVES:
            continue
        key = (owner.module, policy_name(owner.op), owner.where)
        texts[key] = owner.code
        calls[key] += not backward
        for tensor in op.outputs:
            if tensor.counted:
                places.append((key, backward))
                histograms.append(tensor.histogram)
    if not histograms:
        return ()
    stacked = stack(histograms)
    errors = rounding_error(stacked, fmt), rounding_error(stacked, fmt, exponent)
    worst: dict[tuple[tuple[Any, ...], bool], float] = {}
    for i, place in enumerate(places):
        worst[place] = max(worst.get(place, 0.0), float(errors[place[1]][i]))
    found = [
        OperationError(
            module=key[0],
            op=key[1],
            where=key[2],
            text=texts[key],
            calls=calls[key],
            forward=worst.get((key, False), 0.0),
            backward=worst.get((key, True), 0.0),
        )
        for key in dict.fromkeys(key for key, _ in places)
    ]
    return tuple(sorted(found, key=lambda e: -e.worst))
