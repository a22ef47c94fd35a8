"""What a recording in progress shows so far: the loss, the loss scale, and the layers that lose most.

Computed from rows that were counted anyway, by the functions of ``mpdiag analyze``; what these rows
do not show (operations, weight updates, later steps) is named, for it may change the verdict.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.display.wording import counted, percent, scale_text, spoken_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
    from mpdiag.runs.training_log import TrainingStep

MOST_ROWS = 20_000
"""Rows that are looked at, the latest ones: of a longer recording its last steps."""
MOST_LOSSES = 400
WORST = 3
_BARS = "▁▂▃▄▅▆▇█"


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

        from mpdiag.analysis.run_statistics import InMemoryStatistics
        from mpdiag.analysis.scaling.loss_scale import analyze_loss_scale
        from mpdiag.runs.records import Records

        self.changed = False
        if not self._rows:
            return None
        if len(self._tables) > 1:
            self._tables = deque([pa.concat_tables(self._tables).unify_dictionaries()])
        records = Records.from_table(self._tables[0])
        statistics = InMemoryStatistics(records)
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


def verdict_words(so_far: SoFar | None) -> str:
    """The verdict so far, with what it rests on."""
    if so_far is None:
        return "so far nothing: no step was recorded yet"
    return f"so far, {counted(so_far.steps, 'step')}: {so_far.words}"
