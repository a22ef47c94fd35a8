"""All chapters, in the order of the table."""

from __future__ import annotations

from conformance.behaviours import casts, checkpoints, forward, loops, loss_scale, scalers, weights

CHAPTERS = tuple(
    module.CHAPTER
    for module in (loss_scale, scalers, loops, forward, weights, checkpoints, casts)
)
