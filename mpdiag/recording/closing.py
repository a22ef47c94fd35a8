"""Ending what must not be left half done, although Ctrl-C may be pressed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES = 3
"""Whoever presses more often than this is obeyed at once: a disk may hang."""


def carry_through(work: Callable[[bool], None], tries: int = TRIES) -> None:
    """Do something to its end: a Ctrl-C that falls into it is raised afterwards, never swallowed.

    A person presses twice, and a launcher sends a second signal to those who take their time; the
    run folder would say ``recording`` for ever.

    Args:
        work: What to do. It is told whether an interrupt broke it off before, and must bear that.
        tries: How often; the last interrupt is raised from where it falls.

    Raises:
        KeyboardInterrupt: If one fell into the work.
    """
    interrupt = None
    for attempt in range(tries):
        try:
            work(attempt > 0)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
