"""Parts of a training: what is lost late is judged in each of them, so that none hides in the others.

Gradients shrink as a training goes on. Pooled over its later half, a last fifth that loses much may
vanish among the larger gradients before it. Parts are cut by the training's steps, recorded or not.
Beside them stand what each recorded step's gradients reached, and how that moves from step to step.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpdiag.display.wording import counted
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.records import Records

_LATE = ((0.5, 1.0, "later half"), (0.6, 0.8, "fourth fifth"), (0.8, 1.0, "last fifth"))
"""The parts that count, the one that decides where all say the same first."""
WHOLE = "the recorded steps"
"""What a window is called that holds all of them."""


@dataclass(frozen=True)
class Window:
    """The steps from ``first`` to before ``end``.

    Attributes:
        name: What it is called: ``the later half of the training``.
        first, end: Steps; they need not be whole.
        recorded: How many steps of it were recorded.
    """

    name: str
    first: float
    end: float
    recorded: int

    def holds(
        self, steps: NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which of some steps lie in it."""
        inside: NDArray[np.bool_] = (steps >= self.first) & (steps < self.end)
        return inside

    @property
    def words(self) -> str:
        """Where it lies, with its recorded steps, as a phrase."""
        if self.name != WHOLE:
            return f"in {self.name} ({counted(self.recorded, 'recorded step')})"
        if self.recorded == 1:
            return "in the one recorded step"
        return f"over all {self.recorded:,} recorded steps"

    @property
    def when(self) -> str:
        """Where it lies, without their number."""
        return f"over all {WHOLE[4:]}" if self.name == WHOLE else f"in {self.name}"


def whole_window(steps: NDArray[np.int64]) -> Window:
    """All recorded steps, from their sorted numbers."""
    if steps.size == 0:
        return Window(WHOLE, 0, 0, 0)
    return Window(WHOLE, int(steps[0]), int(steps[-1]) + 1, steps.size)


def late_windows(steps: NDArray[np.int64], length: int = 0) -> tuple[Window, ...]:
    """The late parts of a training of which at least one step was recorded.

    Args:
        steps: The recorded steps, in order.
        length: How many steps the training had; 0 if that is not known.

    Returns:
        Parts of the training. If no step of its later half was recorded, parts of what was recorded.
    """
    if steps.size == 0:
        return ()
    reached = int(steps[-1]) + 1
    whole = max(length, reached)
    if steps[-1] >= whole / 2:
        return _windows(steps, whole, "of the training")
    if steps[-1] >= reached / 2:
        return _windows(steps, reached, "of the recorded steps")
    return (whole_window(steps),)


def unseen_windows(steps: NDArray[np.int64], length: int) -> tuple[str, ...]:
    """Names of the late parts of a training of which no step was recorded."""
    names = tuple(f"the {name} of the training" for *_, name in _LATE)
    seen = {window.name for window in late_windows(steps, length)}
    if names[0] not in seen:
        return names[:1]
    return tuple(name for name in names[1:] if name not in seen)


def _windows(steps: NDArray[np.int64], whole: int, of_what: str) -> tuple[Window, ...]:
    found = []
    for begin, end, name in _LATE:
        first, last = begin * whole, end * whole
        recorded = int(((steps >= first) & (steps < last)).sum())
        if recorded:
            found.append(Window(f"the {name} {of_what}", first, last, recorded))
    return tuple(found)


MIN_HEADROOM = 2
"""Powers of two kept free above the largest recorded gradient, at least."""


def step_maxima(records: Records) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """The largest unscaled gradient of each recorded step.

    Returns:
        Steps; maxima, infinite where a gradient was not finite; how many of those there are. A step
        that a scaler skipped overflowed by its scale, not by itself, and is left out.
    """
    gradients = records.of_kind("activation_grad") | records.of_kind("weight_grad")
    rows = np.flatnonzero(gradients & ~records.skipped)
    steps, group = np.unique(records.step[rows].astype(np.int64), return_inverse=True)
    maxima = np.zeros(steps.size)
    values = records.absmax[rows] / records.scale[rows]
    values = np.where(records.infs[rows] + records.nans[rows] > 0, np.inf, values)
    np.maximum.at(maxima, group.reshape(-1), values)
    return steps, maxima, int(np.isinf(maxima).sum())


def by_step(
    records: Records, rows: NDArray[np.bool_], steps: NDArray[np.int64]
) -> ExponentHistogram:
    """Merge some rows by step: a stack of batch shape (steps,); rows of other steps are left out."""
    group = np.searchsorted(steps, records.step)
    known = rows & (group < steps.size)
    known[known] = steps[group[known]] == records.step[known]
    return records.merged(np.where(known, group, -1), steps.size)


def beyond_range(maxima: NDArray[np.float64], target: FloatFormat) -> int:
    """In how many steps the largest gradient, if it is finite, leaves the range without a scale."""
    return int((np.isfinite(maxima) & (maxima >= target.overflow_threshold)).sum())


@dataclass(frozen=True)
class Headroom:
    """How much room the next steps may need, in powers of two.

    Attributes:
        exponents: To keep free above the largest recorded gradient.
        drift: The growth of the maxima: the late half's median over the early half's.
        spread: Their standard deviation about it.
    """

    exponents: int
    drift: float
    spread: float


def headroom(maxima: NDArray[np.float64], trained: NDArray[np.int64]) -> Headroom:
    """Growth and three standard deviations cover what a longer training would show.

    Args:
        maxima: float64 (n,), the largest gradient of each step.
        trained: int64 (n,), what a step trains, as a number. Steps are compared with their own kind: the
            gradients of a generator and of its discriminator may be far apart.
    """
    logs = np.log2(maxima)
    kinds = [logs[trained == kind] for kind in np.unique(trained)]
    kinds.sort(key=lambda own: float(own.max()), reverse=True)
    rooms = [_headroom(own, float(logs.max())) for own in kinds]
    return max(rooms, key=lambda room: room.exponents)


def _headroom(logs: NDArray[np.float64], largest: float) -> Headroom:
    half = len(logs) // 2
    drift = float(np.median(logs[half:]) - np.median(logs[:half])) if half else 0.0
    spread = float(np.std(np.diff(logs)) / math.sqrt(2)) if len(logs) > 2 else 0.0
    wanted = max(0.0, drift) + 3 * spread - (largest - float(np.median(logs[half:])))
    return Headroom(max(MIN_HEADROOM, math.ceil(wanted)), drift, spread)
