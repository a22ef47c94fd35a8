"""What so many recorded steps allow: exact bounds of a share, by Clopper and Pearson.

A share that is seen in few steps says little about all of them: where none of 69 steps overflows, up
to 4 % of all may. The bound holds for steps like the recorded ones; of steps unlike them, as those of
a later phase, nothing is known.
"""

import math

CONFIDENCE = 0.95
"""One-sided: a larger share would show in more steps with this probability."""
_HALVINGS = 60


def largest_share(count: int, of: int) -> float:
    """The largest share of which ``count`` or fewer in ``of`` steps are not yet surprising.

    Args:
        count: In how many steps something was seen.
        of: In how many it was looked for.

    Returns:
        A share; 1 where nothing was looked at.
    """
    if of <= 0 or count >= of:
        return 1.0
    if count == 0:
        return float(-math.expm1(math.log1p(-CONFIDENCE) / of))
    low, high = count / of, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_most(count, of, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(count: int, of: int, share: float) -> float:
    """The probability of at most so many of ``of`` steps, at a share between 0 and 1."""
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(share)
        + (of - k) * math.log1p(-share)
        for k in range(count + 1)
    )
    return math.fsum(map(math.exp, logs)) if 0 < share < 1 else 0.0
