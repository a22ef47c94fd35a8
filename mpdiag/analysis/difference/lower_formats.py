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


def fp8_side(pair: Pair) -> str:
    """The side, ``A`` or ``B``, whose values alone have no more mantissas than FP8's; else empty."""
    epsilons = roundoff(pair.a.dtype), roundoff(pair.b.dtype)
    for side, epsilon, t, other in zip("AB", epsilons, (pair.a, pair.b), (pair.b, pair.a)):
        if all(epsilons) and _mantissas(t, epsilon) <= _FP8:
            sizes = np.abs(t.pieces[0].values[t.pieces[0].values != 0.0])
            # Multiples of one number, as of what cancels, have few where they are small alone.
            large = np.count_nonzero(sizes > 2 * _FP8 * sizes.min(initial=np.inf))
            if min(large, _mantissas(other, epsilon)) > 2 * _FP8:
                return side
    return ""


def _mantissas(t: Tensor, epsilon: float) -> int:
    """How many its traced values have, rounded to a format."""
    values = t.pieces[0].values
    shown = np.abs(values[np.isfinite(values) & (values != 0.0)])
    return np.unique(np.rint(np.frexp(shown)[0] * 2.0 / epsilon)).size


def _usual(side: Iterable[Tensor]) -> float:
    """The largest roundoff that is usual; 0 where too few modules tell."""
    modules: dict[str | None, float] = {}
    for t in side:
        modules[t.module] = max(roundoff(t.dtype), modules.get(t.module, 0.0))
    counts = Counter(modules.values())
    usual = (one for one, count in counts.items() if count > _USUAL * len(modules))
    return max(usual, default=0.0) if len(modules) >= _FEWEST else 0.0
