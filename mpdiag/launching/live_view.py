"""``mpdiag record --live``: now and then a line on stderr that says how far the recording is.

It is written in the training's own thread, from losses that were noted anyway: no thread and no process
of its own, so nothing competes with the training, and a fork copies no lock. The recorder hands over
what it has between two steps, and the line is written when the script calls its model: so it is no part
of what the recorder measures of itself, and the same steps are recorded as without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mpdiag.display.wording import counted

if TYPE_CHECKING:
    from mpdiag.recording.run_folder import Progress

SECONDS_BETWEEN_LINES = 30.0


def _say(line: str) -> None:
    """Write one line; names may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in line)
    print(f"mpdiag: {plain}", file=sys.stderr, flush=True)


class LiveView:
    """Tells of a recording in progress; handed to the recorder as its audience."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._next = 0.0
        self._pending: Progress | None = None
        self._first: float | None = None
        self._loss = "no loss seen yet"
        self._failed = False

    def due(self) -> bool:
        """Whether it is time for another line."""
        return not self._failed and self._pending is None and self._clock() >= self._next

    def show(self, progress: Progress) -> None:
        """Take what is known now, to be told by ``draw``."""
        self._pending = progress
        for step in progress.losses:
            if step.loss is not None:
                self._first = step.loss if self._first is None else self._first
                self._loss = (
                    f"loss {step.loss:.5g} at step {step.step:,}, began at {self._first:.5g}"
                )

    def draw(self) -> None:
        """Tell what was taken, if anything; a failure ends the telling, not the training."""
        progress, self._pending = self._pending, None
        if progress is None:
            return
        try:
            steps = f"{counted(progress.step, 'step')}, {progress.recorded:,} recorded"
            self._say(f"{self._name} · {steps}; {self._loss}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._failed = True
            words = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # stderr itself may be what failed: a pipe that was closed
                _say(f"the live view ended ({words}); recording goes on")
        self._next = self._clock() + SECONDS_BETWEEN_LINES
