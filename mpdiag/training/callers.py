"""Which line of the training loop a warning belongs to."""

import sys

_INSIDE = ("mpdiag", "torch", "contextlib")


def loop_stacklevel() -> int:
    """The ``stacklevel`` at which a warning of the calling function names the user's own line."""
    level, frame = 1, sys._getframe(1)
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE
    ):
        level, frame = level + 1, frame.f_back
    return level
