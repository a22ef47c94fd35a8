"""Amdahl's law: the speed-up of the whole when a part becomes faster."""

from __future__ import annotations

import math


def speedup(share: float, factor: float = math.inf) -> float:
    """The whole's speed-up when a share of its time becomes ``factor`` times faster.

    Args:
        share: Of the whole's time, 0 to 1.
        factor: 1 for no change, infinity for a part that vanishes, which bounds every fix.

    Returns:
        At least 1 for a factor of at least 1; infinite where everything vanishes. Half the time
        made 5 times faster gives 1 / (0.5 + 0.5/5) = 1.67.
    """
    kept = 1 - min(max(share, 0.0), 1.0) * (1 - 1 / factor)
    return math.inf if kept <= 0 else 1 / kept
