"""How recordings end: although Ctrl-C is pressed again, with the program, and never in its children."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

TRIES = 3
"""After so many interrupts the last one is raised at once: the disk may hang."""


def carry_through(work: Callable[[bool], None], tries: int = TRIES) -> None:
    """Finish some work even if Ctrl-C falls into it; the interrupt is raised afterwards.

    People press Ctrl-C twice, and a launcher sends a second signal to processes that take long. A
    folder left half finished would say ``recording`` from then on.

    Args:
        work: The work. Its argument says whether an interrupt broke it off before; it must be able
            to start again.
        tries: How often to start it; the last interrupt is raised from where it falls.

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


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back that Python functions handle; they are raised again afterwards.

    Where C calls Python back, as what loads machine code does, Python prints an exception and drops it:
    a Ctrl-C that falls there would be lost. Handlers run in the main thread, so others hold nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    ordered = sorted(handlers, key=lambda number: number == signal.SIGINT)  # which is raised last
    try:
        for number in ordered:
            signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number in ordered:
            signal.signal(number, handlers[number])
        for number in sorted(set(came), key=ordered.index):
            signal.raise_signal(number)


class LiveRecording(Protocol):
    """A recording that must not outlive this process, or go on in a child of it."""

    def silence(self) -> None:
        """Do nothing any more, and write nothing."""

    def close(self, state: str = "complete") -> None:
        """Finish the run folder."""


live: set[LiveRecording] = set()
"""Recordings of this process that were started and not closed; kept alive here, to be closed."""


def _silence_child() -> None:
    """A forked child (a DataLoader worker) has our hooks but must not write to our run."""
    for recording in list(live):
        recording.silence()


def finish_at_exit() -> None:
    """Close what is still open: a loop called ``start`` alone, or Ctrl-C fell just before a close."""
    error = getattr(sys, "last_type", None)  # of what ended the program
    interrupted = error is not None and issubclass(error, KeyboardInterrupt)
    for recording in list(live):
        recording.close("interrupted" if interrupted else "failed" if error else "complete")


atexit.register(finish_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_child)
