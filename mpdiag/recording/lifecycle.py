"""The recordings of this process: kept from writing in its children, and finished as it ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol


class Recording(Protocol):
    """What is told."""

    def silence(self) -> None:
        """Do nothing any more, and write nothing."""

    def close(self, state: str = "complete") -> None:
        """Finish the run folder."""


live: weakref.WeakSet[Recording] = weakref.WeakSet()
"""Those that were started and not closed."""


def _silence_child() -> None:
    """A forked child (a DataLoader worker) has our hooks but must not write to our run."""
    for recording in list(live):
        recording.silence()


def finish_at_exit() -> None:
    """Nobody closed these: the loop began them with ``start``, or a Ctrl-C fell between two of ours."""
    error = getattr(sys, "last_type", None)  # of what ended the program
    interrupted = error is not None and issubclass(error, KeyboardInterrupt)
    for recording in list(live):
        recording.close("interrupted" if interrupted else "failed" if error else "complete")


atexit.register(finish_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_child)
