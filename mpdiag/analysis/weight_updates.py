"""Master weights: how many updates a 16-bit weight would swallow, as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.layers import share
from mpdiag.analysis.run_statistics import UPDATE_FIGURES
from mpdiag.numerics.formats import BF16, FP16, HALVES
from mpdiag.plan import MasterWeightsPlan

if TYPE_CHECKING:
    from mpdiag.analysis.run_statistics import RunStatistics
    from mpdiag.numerics.formats import FloatFormat

HARMLESS = 0.01
"""Swallowed share of changed weights below which weights could live in the format itself."""


def analyze_weight_updates(evidence: RunStatistics, target: FloatFormat) -> MasterWeightsPlan:
    """Decide on FP32 master weights from the measured updates.

    A weight in a format swallows an update if Δw ≠ 0 and r(r(w) + r(Δw)) = r(w), where r rounds to
    the format.
    """
    names, sums = evidence.updates()
    known = dict(zip(UPDATE_FIGURES, sums, strict=True))
    changed = known["changed"]
    if changed.sum() == 0:
        return MasterWeightsPlan(
            needed=True,
            reason="no weight update was recorded, so FP32 masters are kept to be safe",
        )
    held = target if target in HALVES else BF16  # nothing is counted for FP8 weights
    swallowed, vanished = known["swallowed", held.name], known["vanished", FP16.name]
    fractions = share(swallowed, changed)
    worst = int(np.argmax(fractions))
    fraction = float(share(swallowed.sum(), changed.sum()))
    needed = fraction > HARMLESS or float(fractions[worst]) > 0.1
    verdict = "FP32 masters are needed" if needed else "FP32 masters are not needed"
    return MasterWeightsPlan(
        needed=needed,
        swallowed_fraction=fraction,
        worst_parameter=names[worst],
        reason=f"{fraction:.1%} of all updates would be rounded away by {held.label} weights: {verdict}",
        evidence={
            "changed": int(changed.sum()),
            "swallowed": int(swallowed.sum()),
            "vanished_fp16": int(vanished.sum()),
            "worst_parameter_swallowed": float(fractions[worst]),
            "threshold": HARMLESS,
        },
    )
