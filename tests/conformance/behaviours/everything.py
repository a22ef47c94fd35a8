"""All chapters, in the order of the table."""

from __future__ import annotations

from conformance.behaviours import casts, loops, loss_scale, scalers

CHAPTERS = tuple(module.CHAPTER for module in (loss_scale, scalers, loops, casts))
