"""Layers that one side alone computes in a lower format than the rest of it.

Rounding to that format explains what such a layer returns, but not why it is in that format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpdiag.analysis.difference.alignment import Pair
from mpdiag.analysis.difference.sides import Tensor
from mpdiag.analysis.difference.tolerance import roundoff

_USUAL = 0.25
"""Share of a side's modules that compute in a format, from which on it is usual there."""
_FEWEST = 4
"""Modules of which that is said, at least."""
_FP8 = 8
"""Mantissas of E4M3's values under any scale of a tensor; E5M2's are 4."""


def lower_formats(pairs: Sequence[Pair]) -> Mapping[int, float]:
    """Tensors in a lower format than is usual on their side and than on the other one.

    What their module makes after them is among these.

    Returns:
        The largest roundoff that is usual on the side, by the tensor's ``id``.
    """
    shown = [p for p in pairs if p.a.phase == "forward" and p.a.kind in ("operation", "output")]
    shown = [p for p in shown if roundoff(p.a.dtype) and roundoff(p.b.dtype)]
    found: dict[int, float] = {}
    for side in ([(p.a, p.b) for p in shown], [(p.b, p.a) for p in shown]):
        usual = _usual(t for t, _ in side)
        modules: set[str | None] = set()
        for t, other in side:
            lower = roundoff(t.dtype) > max(usual, roundoff(other.dtype))
            if usual and (lower or t.module in modules):
                found[id(t)] = usual
                modules.add(t.module)
    return found


def fp8_side(pair: Pair, difference: float) -> str:
    """Which side, ``A`` or ``B``, has FP8's few mantissas where the other has more; empty for none."""
    floats = roundoff(pair.a.dtype) and roundoff(pair.b.dtype)
    if not (floats and 0.0 < difference <= 0.5 / _FP8):  # as far as FP8 moves a tensor, at most
        return ""
    for side, t, other in (("A", pair.a, pair.b), ("B", pair.b, pair.a)):
        sizes = [np.abs(x.pieces[0].values) for x in (t, other)]
        # What cancels leaves multiples of one number: where these are small, they have few mantissas.
        large = [x[x > 2 * _FP8 * x[x > 0.0].min(initial=np.inf)] for x in sizes]
        rounded = [np.rint(np.frexp(x)[0] * 2.0 / roundoff(t.dtype)) for x in large]
        few, many = (np.unique(x).size for x in rounded)
        if few <= _FP8 and min(many, rounded[0].size) > 2 * _FP8:
            return side
    return ""


def _usual(side: Iterable[Tensor]) -> float:
    """The largest roundoff that is usual; 0 where too few modules tell."""
    modules: dict[str | None, float] = {}
    for t in side:
        modules[t.module] = max(roundoff(t.dtype), modules.get(t.module, 0.0))
    counts = Counter(modules.values())
    usual = (one for one, count in counts.items() if count > _USUAL * len(modules))
    return max(usual, default=0.0) if len(modules) >= _FEWEST else 0.0
