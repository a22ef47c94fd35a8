"""``mpdiag record --live``: the recording shows itself between two steps, in the script's terminal.

It draws within the training's own thread, from rows and losses that were counted anyway: no thread and
no process of its own, so nothing competes with the training, nothing is drawn into the middle of a
line that the script writes in Python, and a fork copies no lock. Each look waits until it costs less
than a hundredth of the time since the last one. The recorder hands over what it has between two steps,
and it is drawn when the script calls its model: so the drawing is no part of what the recorder
measures of itself, and the same steps are recorded as without it.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from mpdiag.launching.live_state import LiveState, SoFar, verdict_words, worst_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.launching.live_terminal import Surface
    from mpdiag.recording.run_folder import Progress

SHARE = 0.01
"""Of the time that drawing may take, and judging as much again."""
SECONDS_BETWEEN_VERDICTS = 2.0


class LiveView:
    """Shows a recording in progress; handed to the recorder as its audience.

    Args:
        name: What the run is called.
        surface: Where to show it.
        clock: Seconds.
    """

    def __init__(
        self, name: str, surface: Surface, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._name = name
        self._surface = surface
        self._clock = clock
        self._state = LiveState()
        self._so_far: SoFar | None = None
        self._draw_at = self._judge_at = 0.0
        self._pending: Progress | None = None
        self._shown = self._failed = False

    def due(self) -> bool:
        """Whether it is time to draw again."""
        return not self._failed and self._pending is None and self._clock() >= self._draw_at

    def show(self, progress: Progress) -> None:
        """Take what is known now, to be drawn by ``draw``."""
        self._pending = progress

    def draw(self) -> None:
        """Draw what was taken, if anything; a failure ends the drawing, not the training."""
        progress, self._pending = self._pending, None
        if progress is None:
            return
        try:
            self._draw(progress)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self.close()
            self._failed = True
            words = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # stderr itself may be what failed: a pipe that was closed
                print(f"mpdiag: the live view ended ({words}); recording goes on", file=sys.stderr)

    def _draw(self, progress: Progress) -> None:
        begin = self._clock()
        self._state.add(progress.tables, progress.losses)
        judged = 0.0
        if self._state.changed and begin >= self._judge_at:
            self._so_far = self._state.so_far()
            judged = self._clock() - begin
            self._judge_at = begin + max(SECONDS_BETWEEN_VERDICTS, judged / SHARE)
        title = f"mpdiag · {self._name} · {progress.step:,} steps, {progress.recorded:,} recorded"
        self._surface.draw(title, self._lines())
        self._shown = True
        drawn = self._clock() - begin - judged
        self._draw_at = begin + judged + max(self._surface.seconds, drawn / SHARE)

    def _lines(self) -> list[str]:
        lines = [self._state.loss_words(), verdict_words(self._so_far)]
        if self._so_far is not None:
            lines.append(worst_words(self._so_far))
        return [*lines, "operations, weight updates and later steps may change it"]

    def close(self) -> None:
        """Leave the terminal as it was; the last word stays. Doing so twice does no harm."""
        shown, self._shown = self._shown, False
        with suppress(Exception):
            self._surface.close([verdict_words(self._so_far)] if shown else [])
