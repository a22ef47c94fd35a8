"""Layers that one side alone computes in a lower format than the rest of it.

Rounding to that format explains what such a layer returns, but not why it is in that format. The format
is that of the values, too: E4M3 values that are stored in BF16 need four significant bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpdiag.analysis.difference.alignment import Pair
from mpdiag.analysis.difference.sides import Tensor
from mpdiag.analysis.difference.tolerance import roundoff
from mpdiag.numerics.formats import FP8_E4M3

_USUAL = 0.25
"""Share of a side's modules that compute in a format, from which on it is usual there."""
_FEWEST = 4
"""Modules of which that is said, at least."""
_ENOUGH = 16
"""Values other than zero that show their format, at least."""
_DISTINCT = 8
"""Different magnitudes among them, at least."""


def lower_formats(pairs: Sequence[Pair]) -> Mapping[int, float]:
    """Tensors in a lower format than is usual on their side and than on the other one.

    What their module makes after them is among these.

    Returns:
        The largest roundoff that is usual on the side, by the tensor's ``id``.
    """
    shown = [p for p in pairs if p.a.phase == "forward" and p.a.kind in ("operation", "output")]
    shown = [p for p in shown if roundoff(p.a.dtype) and roundoff(p.b.dtype)]
    sides = [[(t, _shown(t)) for t in ts] for ts in zip(*((p.a, p.b) for p in shown), strict=True)]
    found: dict[int, float] = {}
    for mine, theirs in (sides, sides[::-1]) if sides else ():
        usual = _usual(mine)
        modules: set[str | None] = set()
        for (t, own), (_, other) in zip(mine, theirs, strict=True):
            if usual and (own > max(usual, other) or t.module in modules):
                found[id(t)] = usual
                modules.add(t.module)
    return found


def _usual(side: Iterable[tuple[Tensor, float]]) -> float:
    """The largest roundoff that is usual; 0 where too few modules tell."""
    modules: dict[str | None, float] = {}
    for t, own in side:
        modules[t.module] = max(own, modules.get(t.module, 0.0))
    counts = Counter(modules.values())
    usual = (one for one, count in counts.items() if count > _USUAL * len(modules))
    return max(usual, default=0.0) if len(modules) >= _FEWEST else 0.0


def _shown(t: Tensor) -> float:
    """The roundoff of a tensor: of its dtype, or of FP8 if its values have no more bits."""
    values = np.abs(np.concatenate([piece.values for piece in t.pieces]))
    values = values[(values > 0.0) & np.isfinite(values)]
    low = 2.0**-FP8_E4M3.mantissa_bits
    if values.size < _ENOUGH or np.unique(values).size < _DISTINCT:
        return roundoff(t.dtype)
    bits = np.frexp(values)[0] / (low / 2)
    return low if (bits == np.round(bits)).all() else roundoff(t.dtype)
