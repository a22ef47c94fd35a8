"""Master weights: how many updates a 16-bit weight would swallow, as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.layers import share
from mpdiag.analysis.run_statistics import UPDATE_COLUMNS
from mpdiag.plan import MasterWeightsPlan

if TYPE_CHECKING:
    from mpdiag.analysis.run_statistics import RunStatistics
    from mpdiag.numerics.formats import FloatFormat

HARMLESS = 0.01
"""Swallowed share of changed weights below which weights could live in the format itself."""


def analyze_weight_updates(evidence: RunStatistics, target: FloatFormat) -> MasterWeightsPlan:
    """Decide on FP32 master weights from the measured updates.

    An update is swallowed when Δw ≠ 0 and fp16(fp16(w) + fp16(Δw)) = fp16(w).
    """
    names, sums = evidence.updates()
    known = dict(zip(UPDATE_COLUMNS, sums, strict=True))
    changed = known["changed"]
    if changed.sum() == 0:
        return MasterWeightsPlan(
            needed=True,
            reason="no weight update was recorded, so FP32 masters are kept to be safe",
        )
    column = "swallowed_fp16" if target.name == "fp16" else "swallowed_bf16"
    swallowed, vanished = known[column], known["vanished_fp16"]
    fractions = share(swallowed, changed)
    worst = int(np.argmax(fractions))
    fraction = float(share(swallowed.sum(), changed.sum()))
    needed = fraction > HARMLESS or float(fractions[worst]) > 0.1
    label = "FP16" if target.name == "fp16" else "BF16"
    verdict = "FP32 masters are needed" if needed else "FP32 masters are not needed"
    return MasterWeightsPlan(
        needed=needed,
        swallowed_fraction=fraction,
        worst_parameter=names[worst],
        reason=f"{fraction:.1%} of all updates would be rounded away by {label} weights: {verdict}",
        evidence={
            "changed": int(changed.sum()),
            "swallowed": int(swallowed.sum()),
            "vanished_fp16": int(vanished.sum()),
            "worst_parameter_swallowed": float(fractions[worst]),
            "threshold": HARMLESS,
        },
    )
