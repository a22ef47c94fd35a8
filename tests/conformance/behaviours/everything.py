"""All chapters, in the order of the table."""

from __future__ import annotations

from conformance.behaviours import (
    casts,
    checkpoints,
    forward,
    loops,
    loss_scale,
    scalers,
    steppers,
    weights,
)

CHAPTERS = tuple(
    module.CHAPTER
    for module in (loss_scale, scalers, loops, steppers, forward, weights, checkpoints, casts)
)
