"""How far two tensors are apart, and how far rounding explains.

The distance is a root mean square over the positions, without the few that are furthest apart: where
rounding turns a choice (the largest of a window, an expert), single values differ by more than rounding.
The norm sees what the positions miss.

Rounding explains ``FACTOR * _ONE_TWIN`` times what the twins of both sides come apart. Where one side
has no twin, the other's stands for it, widened by the ratio of their unit roundoffs. Where neither has
one, the unit roundoff is propagated instead: by √k for the k operations before, as errors of independent
signs add up (Higham and Mary, *A new approach to probabilistic rounding error analysis*, SIAM Journal on
Scientific Computing 41, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpdiag.numerics.formats import BF16, FP16, FP32, TF32
from mpdiag.numerics.trimmed import DROPPED, trimmed_rms

FACTOR = 2.0
"""How many times further than what moves them two sides may be apart."""
_ONE_TWIN = 1.5
"""How many times further than one twin shows rounding may move a tensor."""
_ROUNDOFF = {
    "float64": 2.0**-52,
    **{str(fmt.torch_name): 2.0**-fmt.mantissa_bits for fmt in (FP32, BF16, FP16)},
    **{fmt.name: 2.0**-fmt.mantissa_bits for fmt in (TF32, BF16)},
}
Values = tuple[NDArray[np.float64], float]
"""Values at positions, and the norm."""
_BOUND = 8.0
_NORM = 2.0**-23
"""Relative error of a norm that FP32 adds up, for the root of each element."""
_FEWEST = 64
"""Elements that a norm's error is that of, at least."""
_SHOWN = 0.25
"""Share of positions that are not zero from which on a twin shows what moves the norm."""


@dataclass(frozen=True)
class Apart:
    """Two tensors compared.

    Attributes:
        difference: How far they are apart, beside the size of the larger one.
        tolerance: How far apart rounding may take them, in the same unit.
    """

    difference: float
    tolerance: float

    @property
    def ratio(self) -> float:
        """Difference over tolerance; above 1 rounding does not explain it."""
        if self.difference == 0.0 or self.tolerance == math.inf:
            return 0.0
        return self.difference / self.tolerance if self.tolerance > 0.0 else math.inf


def roundoff(dtype: str, operands: str = "") -> float:
    """Distance from 1 to the next value of a dtype, or of operands' format; 0 of integers."""
    return max(_ROUNDOFF.get(dtype, 0.0), _ROUNDOFF.get(operands, 0.0))


def spread(
    twins: Sequence[float | None], size: float, depth: int, epsilon: Sequence[float]
) -> float:
    """How far rounding on both sides may have moved a tensor.

    Args:
        twins: How far each side's twin moved it; None where there is none.
        size: Its root mean square.
        depth: How many operations came before it.
        epsilon: The largest roundoff of what came before it, on each side.
    """
    a, b = twins
    if a is None and b is None:
        return _BOUND * max(epsilon) * math.sqrt(depth + 1) * size
    wider = [e / max(min(epsilon), 2.0**-53) if min(epsilon) else 1.0 for e in epsilon]
    mine = a if a is not None else (b or 0.0) * wider[0] / min(wider)
    theirs = b if b is not None else (a or 0.0) * wider[1] / min(wider)
    return _ONE_TWIN * math.hypot(mine, theirs)


def distance(a: NDArray[np.float64], b: NDArray[np.float64], dropped: int = DROPPED) -> float:
    """Root mean square difference over positions that both sides have; infinite where one is."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=~same))
    return trimmed_rms(apart, dropped)


def size_of(*values: NDArray[np.float64]) -> float:
    """The largest root mean square of some values, what is not finite left out."""
    found = [0.0]
    for some in values:
        finite = some[np.isfinite(some)]
        found.append(float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0)
    return max(found)


def typical(a: Values, b: Values, numel: int) -> float:
    """The larger root mean square of all elements, by the norms; 0 if these are not known."""
    return max(a[1], b[1]) / math.sqrt(numel) if numel and min(a[1], b[1]) >= 0.0 else 0.0


def apart(a: Values, b: Values, moved: float, numel: int, dropped: int = DROPPED) -> Apart:
    """Compare values at the same positions, and norms.

    Args:
        a: Values of one side, (k,), and the norm; negative if it is not known.
        b: Those of the other.
        moved: What ``spread`` gives; 0 where nothing may differ.
        numel: Elements that the norms are of.
        dropped: One value in this many is left out.
    """
    size = (size_of(a[0], b[0]) if a[0].size else typical(a, b, numel)) or 1.0
    found = Apart(distance(a[0], b[0], dropped) / size, FACTOR * moved / size)
    if a[0].size and math.isnan(a[1]) != math.isnan(b[1]):
        return Apart(math.inf, found.tolerance)  # a value between the positions is NaN
    largest = max(a[1], b[1])
    if not (math.isfinite(a[1]) and math.isfinite(b[1]) and largest > 0.0):
        return found
    shown = max(np.count_nonzero(a[0]), np.count_nonzero(b[0]))
    if a[0].size and shown < _SHOWN * a[0].size:
        return found  # a twin shows nothing of zeros, as of tokens that another expert has
    usual = largest / math.sqrt(numel)  # the positions may lie where a tensor is small
    allowed = FACTOR * moved / min(size, usual) + _NORM * math.sqrt(max(numel, _FEWEST))
    norms = Apart(abs(a[1] - b[1]) / largest, allowed)
    return norms if norms.ratio > max(1.0, found.ratio) else found
