"""The dtype in which gradients can be summed over ranks, and whether to divide before the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.layers import share
from mpdiag.numerics.formats import FP16, FP32
from mpdiag.plan import ReductionPlan

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers

HEADROOM = 4.0
HARMLESS = 0.001
"""Share of Σ|g| that may be lost to zero by dividing before the sum."""


def choose_reduction(layers: Layers, scale: float, world_size: int) -> ReductionPlan | None:
    """Choose the reduction for data-parallel training; None for one rank.

    A sum over ranks reaches at most world size × the largest gradient × the loss scale. If that
    fits into FP16 with headroom, FP16 halves the traffic. If not, dividing first may make it fit, unless
    that flushes small gradients to zero. Otherwise the reduction stays in FP32.
    """
    h = layers.of_kind("weight_grad").histograms
    if world_size < 2 or len(h.absmax) == 0:
        return None
    top = float(h.absmax.max()) * scale * HEADROOM
    exponent = int(np.floor(np.log2(scale))) - int(np.ceil(np.log2(world_size)))
    lost = float(
        share(h.abs_sum(FP16.zero_exponent - exponent).value.sum(), h.abs_sum().value.sum())
    )
    evidence = {
        "absmax": float(h.absmax.max()),
        "scale": scale,
        "world_size": world_size,
        "sum_lost_divided_first": lost,
    }
    if top * world_size < FP16.max:
        reason = f"{world_size} ranks' largest gradients sum to less than FP16's {FP16.max:.5g}"
        return ReductionPlan(FP16.name, pre_divide=False, reason=reason, evidence=evidence)
    if top < FP16.max and lost <= HARMLESS:
        reason = (
            f"the sum over {world_size} ranks could overflow FP16; dividing first prevents that"
        )
        return ReductionPlan(FP16.name, pre_divide=True, reason=reason, evidence=evidence)
    reason = f"it is not certain that the sum over {world_size} ranks, or even its parts, fit FP16"
    return ReductionPlan(FP32.name, pre_divide=False, reason=reason, evidence=evidence)
