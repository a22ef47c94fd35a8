"""A run is saved when SIGTERM or SIGHUP ends its process.

Launchers stop the other ranks with SIGTERM when one has failed, schedulers send it at a job's time
limit, and a closed connection sends SIGHUP. Python calls a handler between two of its instructions, so
never while its main thread waits in a collective, or for a device. A thread of ours hears of the signal
through Python's wakeup file. If the main thread does not answer, that thread saves and ends the process.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

ANSWER_SECONDS = 0.6
"""How long the main thread may take to answer a signal."""
SAVE_SECONDS = 1.0
"""How long saving in its place may take: a device that waits for other ranks is read in vain."""


class Saved(Protocol):
    """What is saved when a signal ends the process."""

    def finish(self, state: str) -> None:
        """Finish the run folder; doing so twice does no harm."""

    def rescue(self) -> None:
        """Finish it from another thread, while the main thread waits in a call of torch."""


class Termination:
    """Saves a run on SIGTERM and SIGHUP, then ends the process as the signal would have.

    A signal that the script handles, or that is ignored (as under ``nohup``), stays as it is.

    Args:
        saved: The run; not kept alive.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = weakref.ref(saved)
        self._process = os.getpid()
        self._finishing = False
        self._late: int | None = None  # a signal that came while the folder was finished
        self._answered = threading.Event()
        self._turn = threading.Lock()  # whoever has it saves, for good

    def install(self) -> None:
        """Handle the signals from now on, if this is the main thread."""
        if os.name != "posix" or threading.current_thread() is not threading.main_thread():
            return
        numbers = (signal.SIGTERM, signal.SIGHUP)
        ours = [n for n in numbers if signal.getsignal(n) == signal.SIG_DFL]
        for number in ours:
            signal.signal(number, self._handle)
        if ours:
            self._listen()

    @contextlib.contextmanager
    def after_this(self) -> Iterator[None]:
        """While the folder is finished, a signal waits; it ends the process afterwards."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
            if self._late is not None:
                die_of(self._late)

    def _handle(self, number: int, _frame: Any) -> None:
        if os.getpid() == self._process:
            self._answered.set()
            saved = self._saved()
            if self._finishing:
                self._late = number
                return
            if not self._turn.acquire(blocking=False):
                time.sleep(SAVE_SECONDS)  # the rescue came first, and ends the process
            elif saved is not None:
                saved.finish("interrupted")
        die_of(number)

    # -- while the main thread waits in a call of torch --------------------------------------------

    def _listen(self) -> None:
        """Let a thread hear of signals, unless the script uses the wakeup file itself."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        _listening.append(writing)
        threading.Thread(
            target=self._hear, args=(reading,), name="mpdiag-signals", daemon=True
        ).start()

    def _hear(self, reading: int) -> None:
        while heard := os.read(reading, 1):
            number = heard[0]
            if number not in (signal.SIGTERM, signal.SIGHUP):
                continue
            if signal.getsignal(number) != self._handle or self._answered.wait(ANSWER_SECONDS):
                continue
            if not self._turn.acquire(blocking=False):
                continue
            saved = self._saved()
            if saved is not None:
                rescue = threading.Thread(target=saved.rescue, daemon=True)
                rescue.start()
                rescue.join(SAVE_SECONDS)
            die_of(number)


_listening: list[int] = []
_masks = threading.local()


def _before_fork() -> None:
    """Hold signals back: in a child that is just being made, Python would drop them.

    And they would be written into the parent's wakeup file.
    """
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget_in_child() -> None:
    """A forked child must not write its signals into its parent's file, and ends as they say.

    A handler in Python would come late: after a call that began just after the signal.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Termination):
            signal.signal(number, signal.SIG_DFL)
    if _listening:
        _listening.clear()
        signal.set_wakeup_fd(-1)
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child
    )


def die_of(number: int) -> None:
    """End this process as the signal would have; from any thread, where ``signal.signal`` refuses."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
