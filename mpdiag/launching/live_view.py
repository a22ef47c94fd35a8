"""``mpdiag record --live``: now and then a line on stderr that says how the recording goes.

It is written in the training's own thread, from rows and losses that were counted anyway: no thread and
no process of its own, so nothing competes with the training, and a fork copies no lock. The recorder
hands over what it has between two steps, and the line is written when the script calls its model: so
it is no part of what the recorder measures of itself, and the same steps are recorded as without it.

The verdict comes from the functions of ``mpdiag analyze``; what these rows do not show (operations,
weight updates, later steps) is named, for it may change the verdict.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.display.wording import counted, percent, scale_text, spoken_layer

if TYPE_CHECKING:
    import pyarrow as pa

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
    from mpdiag.recording.run_folder import Progress
    from mpdiag.runs.training_log import TrainingStep

MOST_ROWS = 20_000
"""Rows that are looked at, the latest ones: of a longer recording its last steps."""
WORST = 3
SECONDS_BETWEEN_LINES = 30.0
SHARE = 0.01
"""Of the time that judging and writing may take."""


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
        self._first: float | None = None
        self._last: tuple[int, float] | None = None
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
        for step in losses:
            if step.loss is not None:
                self._last = step.step, step.loss
                self._first = step.loss if self._first is None else self._first

    def loss_words(self) -> str:
        """The last loss, and where it began."""
        if self._last is None:
            return "no loss seen yet"
        step, loss = self._last
        return f"loss {loss:.5g} at step {step:,}, began at {self._first:.5g}"

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


def _say(line: str) -> None:
    """Write one line; names may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in line)
    print(f"mpdiag: {plain}", file=sys.stderr, flush=True)


class LiveView:
    """Tells of a recording in progress; handed to the recorder as its audience.

    Args:
        name: What the run is called.
        say: Writes a line.
        clock: Seconds.
    """

    def __init__(
        self,
        name: str,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._state = LiveState()
        self._so_far: SoFar | None = None
        self._next = 0.0
        self._pending: Progress | None = None
        self._seen = 0
        self._shown = self._failed = False

    def due(self) -> bool:
        """Whether it is time for another line."""
        return not self._failed and self._pending is None and self._clock() >= self._next

    def show(self, progress: Progress) -> None:
        """Take what is known now, to be told by ``draw``, or to be judged by ``close``."""
        if self._pending is not None:
            self._state.add(self._pending.tables, self._pending.losses)
        self._pending = progress

    def draw(self) -> None:
        """Tell what was taken, if anything; a failure ends the telling, not the training."""
        begin, progress = self._clock(), self._pending
        if progress is None:
            return
        try:
            self._take_in()
            steps = counted(progress.step, "step")
            title = f"{self._name} · {steps}, {progress.recorded:,} recorded"
            self._say("; ".join((title, *self._words())))
            self._shown = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self.close()
            self._failed = True
            words = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # stderr itself may be what failed: a pipe that was closed
                _say(f"the live view ended ({words}); recording goes on")
        now = self._clock()
        self._next = now + max(SECONDS_BETWEEN_LINES, (now - begin) / SHARE)

    def _words(self) -> list[str]:
        words = [self._state.loss_words(), verdict_words(self._so_far, self._seen)]
        if self._so_far is not None:
            words.append(worst_words(self._so_far))
        return [*words, "operations, weight updates and later steps may change it"]

    def close(self) -> None:
        """Judge what came last, and say so; doing so twice does no harm."""
        shown, self._shown = self._shown, False
        with suppress(Exception):
            if shown:
                self._take_in()
                self._say(verdict_words(self._so_far, self._seen, ended=True))

    def _take_in(self) -> None:
        """Take in what was handed over, and judge it if there is something new."""
        last, self._pending = self._pending, None
        if last is not None:
            self._seen = last.step
            self._state.add(last.tables, last.losses)
        if self._state.changed:
            self._so_far = self._state.so_far()
