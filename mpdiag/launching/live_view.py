"""``mpdiag record --live``: the recording shows itself between two steps, in the script's terminal.

It draws within the training's own thread, from rows and losses that were counted anyway: no thread and
no process of its own, so nothing competes with the training, nothing is drawn into the middle of a
line that the script writes in Python, and a fork copies no lock. Each look waits until it costs less
than a hundredth of the time since the last one. The recorder hands over what it has between two steps,
and it is drawn when the script calls its model: so the drawing is no part of what the recorder
measures of itself, and the same steps are recorded as without it.

The verdict comes from the functions of ``mpdiag analyze``; what these rows do not show (operations,
weight updates, later steps) is named, for it may change the verdict.

The script's own output is never taken hold of: it goes to the terminal as it is written, by Python, by
C or by a child process. The terminal is told to scroll all but its last lines (DECSTBM, as ``apt``
does), and these are drawn between two steps, the cursor put back. Where that cannot be (stderr is no
terminal, or a small or a dumb one), a plain line is written every half a minute.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from mpdiag.display.wording import counted, percent, scale_text, spoken_layer

if TYPE_CHECKING:
    import pyarrow as pa

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
    from mpdiag.recording.run_folder import Progress
    from mpdiag.runs.training_log import TrainingStep

MOST_ROWS = 20_000
"""Rows that are looked at, the latest ones: of a longer recording its last steps."""
MOST_LOSSES = 400
WORST = 3
_BARS = "▁▂▃▄▅▆▇█"
LINES = 5
"""Of the panel, its rule included."""
LEAST_ROWS, LEAST_COLUMNS = 15, 50
SECONDS_BETWEEN_LINES = 30.0
SHARE = 0.01
"""Of the time that drawing may take, and judging as much again."""
SECONDS_BETWEEN_VERDICTS = 2.0
_STYLES = {0: "\x1b[2m", 2: "\x1b[1m"}
"""Dim for the rule, bold for the verdict."""


@dataclass(frozen=True)
class SoFar:
    """What the recorded steps show.

    Attributes:
        steps: How many of them were looked at.
        words: The loss scale, in a sentence.
        worst: Layers that lose most to 0 without a scale, each with the share of its values.
    """

    steps: int
    words: str
    worst: tuple[tuple[str, float], ...] = ()


class LiveState:
    """Takes in what was counted since the last look; holds at most ``MOST_ROWS`` rows."""

    def __init__(self) -> None:
        self._tables: deque[pa.Table] = deque()
        self._rows = 0
        self._losses: deque[tuple[int, float]] = deque(maxlen=MOST_LOSSES)
        self._first: float | None = None
        self.changed = False
        """Whether rows came since ``so_far`` was asked for."""
        import mpdiag.analysis.scaling.loss_scale  # noqa: F401 - now, not between two steps

    def add(self, tables: Sequence[pa.Table], losses: Sequence[TrainingStep]) -> None:
        """Take in rows and losses that are new."""
        for table in tables:
            self._tables.append(table)
            self._rows += table.num_rows
            self.changed = True
        while len(self._tables) > 1 and self._rows - self._tables[0].num_rows >= MOST_ROWS:
            self._rows -= self._tables.popleft().num_rows
        known = self._losses[-1][0] if self._losses else -1
        for step in losses:
            if step.loss is not None and step.step > known:
                self._losses.append((step.step, step.loss))
                self._first = step.loss if self._first is None else self._first

    def loss_words(self, width: int = 30) -> str:
        """The last loss, where it began, and a sparkline of the last ones."""
        if not self._losses or self._first is None:
            return "no loss seen yet"
        step, loss = self._losses[-1]
        return f"loss {loss:.5g} at step {step:,}  {self._sparkline(width)}  began at {self._first:.5g}"

    def _sparkline(self, width: int) -> str:
        values = [loss for _, loss in self._losses]
        each = max(1, -(-len(values) // width))
        means = [_mean(values[i : i + each]) for i in range(0, len(values), each)]
        finite = [v for v in means if math.isfinite(v)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        span = high - low
        return "".join(
            "×"
            if not math.isfinite(v)
            else _BARS[round((v - low) / span * (len(_BARS) - 1)) if span > 0 else 0]
            for v in means
        )

    def so_far(self) -> SoFar | None:
        """What the rows show; None without any."""
        import numpy as np
        import pyarrow as pa

        from mpdiag.analysis.run_statistics import RunStatistics
        from mpdiag.analysis.scaling.loss_scale import analyze_loss_scale
        from mpdiag.runs.records import Records

        self.changed = False
        if not self._rows:
            return None
        if len(self._tables) > 1:
            self._tables = deque([pa.concat_tables(self._tables).unify_dictionaries()])
        records = Records.from_table(self._tables[0])
        statistics = RunStatistics.of(records)
        layers = statistics.layers()
        found = analyze_loss_scale(statistics, layers)
        steps = int(np.unique(records.step).size)
        return SoFar(steps, scale_words(found), worst_layers(layers))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scale_words(found: LossScaleAnalysis) -> str:
    """What is known of the loss scale, in a sentence."""
    plan = found.plan
    if found.void:
        return f"nothing can be said yet: {found.void}"
    if not found.fits:
        return "FP16 would lose what matters at any loss scale"
    if plan.need == "not needed":
        return f"FP16 needs no loss scale; any up to {scale_text(plan.upper)} works"
    needs = "needs" if plan.need == "needed" else "gains from"
    return (
        f"FP16 {needs} a loss scale; {scale_text(plan.lower)} to {scale_text(plan.upper)} work, "
        f"{scale_text(plan.recommended)} is advised"
    )


def worst_layers(layers: Layers, most: int = WORST) -> tuple[tuple[str, float], ...]:
    """The layers whose activation gradients lose the largest share of values without a scale."""
    import numpy as np

    from mpdiag.analysis.layers import share
    from mpdiag.numerics.formats import FP16

    gradients = layers.of_kind("activation_grad")
    if not len(gradients):
        return ()
    h = gradients.histograms
    lost = share(h.lost_to_zero(FP16).value, h.nonzero)
    order = np.argsort(-lost, kind="stable")[:most]
    return tuple((spoken_layer(str(gradients.names[i])), float(lost[i])) for i in order if lost[i])


def worst_words(so_far: SoFar) -> str:
    """The layers that lose most, in a line."""
    if not so_far.worst:
        return "no layer loses a value to 0 without a scale"
    each = ", ".join(f"{name} {percent(lost)}" for name, lost in so_far.worst)
    return f"most lost to 0 without a scale: {each}"


def verdict_words(so_far: SoFar | None, seen: int, *, ended: bool = False) -> str:
    """The verdict, with the steps it rests on.

    Args:
        so_far: What the recorded steps show; None without any.
        seen: Steps of the training.
        ended: Whether no more will come.
    """
    from mpdiag.analysis.recording_checks import FEW_STEPS

    if so_far is None:
        none = "no step was recorded" if ended else "no step was recorded yet"
        return f"so far nothing: {none}"
    steps = f"{so_far.steps:,} of {counted(seen, 'step')}"
    if so_far.steps < FEW_STEPS and not ended:
        return f"so far, {steps} recorded: a verdict comes at {FEW_STEPS}"
    return f"{'' if ended else 'so far, '}{steps} recorded: {so_far.words}"


class PlainLines:
    """A line on stderr now and then; attributes as for ``Panel``."""

    def __init__(self) -> None:
        self.seconds = SECONDS_BETWEEN_LINES

    def draw(self, title: str, lines: Sequence[str]) -> None:
        """Write one line."""
        print(f"mpdiag: {_plain('; '.join((title, *lines)))}", file=sys.stderr, flush=True)

    def close(self, lines: Sequence[str]) -> None:
        """Write the last word."""
        for line in lines:
            print(f"mpdiag: {line}", file=sys.stderr, flush=True)


class Panel:
    """The last lines of a terminal; everything above them scrolls as it always does.

    Args:
        fd: The terminal.

    Attributes:
        seconds: How long to wait at least before the next time.
    """

    def __init__(self, fd: int) -> None:
        self.seconds = 0.5
        self._fd = fd
        self._size = (0, 0)
        self._mine = os.getpid()

    def _measure(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:
            return 80, 24
        return size.columns, size.lines

    def _reserve(self, rows: int) -> str:
        """Make room below the cursor, and let all above it scroll alone."""
        room = "\x1bD" * LINES + f"\x1b[{LINES}A"  # a newline would take the cursor to column 1
        return f"{room}\x1b7\x1b[1;{rows - LINES}r\x1b8"

    def draw(self, title: str, lines: Sequence[str]) -> None:
        """Draw the panel; the cursor stays where the script has it."""
        size = self._measure()
        columns, rows = size
        if rows <= LINES + 1 or os.getpid() != self._mine:
            return
        text = ""
        if size != self._size:  # at first, or the window has another size now
            text, self._size = self._reserve(rows), size
        rule = f"── mpdiag · {title} "
        rule += "─" * max(0, columns - 1 - len(rule))
        shown = [*[rule, *lines][:LINES], *[""] * (LINES - 1 - len(lines))]
        text += "\x1b7"
        for i, line in enumerate(shown):
            text += (
                f"\x1b[{rows - LINES + 1 + i};1H\x1b[0m\x1b[2K{self._styled(i, line, columns - 1)}"
            )
        self._write(text + "\x1b8")

    def _styled(self, row: int, line: str, width: int) -> str:
        """A line, cut to the width; names in it cannot move the cursor."""
        text = Text(_plain(line))
        text.truncate(width, overflow="ellipsis")
        return f"{_STYLES.get(row, '')}{text.plain}\x1b[0m"

    def close(self, lines: Sequence[str]) -> None:
        """Give the terminal back, and write the last word above the prompt."""
        if os.getpid() != self._mine:
            return
        text = ""
        if self._size != (0, 0):
            text, self._size = "\x1b7\x1b[r\x1b8\x1b[0m\x1b[J", (0, 0)
        self._write(text)
        PlainLines().close(lines)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        with suppress(OSError):  # the terminal is gone; the training goes on
            while data:
                data = data[os.write(self._fd, data) :]


def _plain(text: str) -> str:
    """Text of one line: names may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text)


Surface = Panel | PlainLines
"""Where to show something."""


def open_surface() -> Surface:
    """The panel where stderr is a terminal that can hold it, else plain lines."""
    try:
        fd = sys.stderr.fileno()
        size = os.get_terminal_size(fd) if os.isatty(fd) else None
    except (OSError, ValueError, AttributeError):  # no file at all, as in a notebook
        return PlainLines()
    if size is None or os.name == "nt" or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainLines()
    if size.lines < LEAST_ROWS or size.columns < LEAST_COLUMNS:
        return PlainLines()
    return Panel(fd)


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
        self._seen = 0
        self._shown = self._failed = False

    def due(self) -> bool:
        """Whether it is time to draw again."""
        return not self._failed and self._pending is None and self._clock() >= self._draw_at

    def show(self, progress: Progress) -> None:
        """Take what is known now, to be drawn by ``draw``, or to be judged by ``close``."""
        if self._pending is not None:
            self._state.add(self._pending.tables, self._pending.losses)
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
        self._seen = progress.step
        judged = 0.0
        if self._state.changed and begin >= self._judge_at:
            self._so_far = self._state.so_far()
            judged = self._clock() - begin
            self._judge_at = begin + max(SECONDS_BETWEEN_VERDICTS, judged / SHARE)
        steps = counted(progress.step, "step")
        title = f"{self._name} · {steps}, {progress.recorded:,} recorded"
        self._surface.draw(title, self._lines())
        self._shown = True
        drawn = self._clock() - begin - judged
        self._draw_at = begin + judged + max(self._surface.seconds, drawn / SHARE)

    def _lines(self) -> list[str]:
        lines = [self._state.loss_words(), verdict_words(self._so_far, self._seen)]
        if self._so_far is not None:
            lines.append(worst_words(self._so_far))
        return [*lines, "operations, weight updates and later steps may change it"]

    def close(self) -> None:
        """Judge what came last, and leave the terminal as it was; the verdict stays.

        Doing so twice does no harm.
        """
        shown, self._shown = self._shown, False
        words: list[str] = []
        with suppress(Exception):
            if shown:
                self._take_the_last()
                words = [verdict_words(self._so_far, self._seen, ended=True)]
        with suppress(Exception):
            self._surface.close(words)

    def _take_the_last(self) -> None:
        last, self._pending = self._pending, None
        if last is not None:
            self._seen = last.step
            self._state.add(last.tables, last.losses)
        if self._state.changed:
            self._so_far = self._state.so_far()
