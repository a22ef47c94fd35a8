"""How to scale the loss: every method is replayed over the recording, the simplest that does wins.

Simplest first: no scale, a constant one, ``Backoff`` with ever shorter growth intervals,
``LogNormal``. A method does when it skips few steps and loses little of the gradients' sum where
most is lost. Training goes on after a recording ends: a scale that cannot adapt must do with maxima
raised by the headroom, and where gradients have been shrinking, every method is replayed on over
steps that shrink as much again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.layers import share
from mpdiag.analysis.scaling.replay import play
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale, LogNormal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.numerics.loss_scalers import Scaler
    from mpdiag.plan import Method

TOLERATED_SKIPS = 0.01
"""Share of the recorded steps a method may skip; ``Backoff`` at its defaults skips 0.0005."""
INTERVALS = (2000, 1000, 500, 200, 100, 50, 20)
"""Growth intervals tried, ``torch.amp.GradScaler``'s first: the longer, the fewer skips."""
LARGEST_SCALE = 2.0**24
"""No scale beyond this is recommended, nor grown to: nothing gains from it."""


@dataclass(frozen=True)
class Candidate:
    """A method, and what it would have done to the recorded steps.

    Attributes:
        method: Its name.
        scale: The scale it begins with.
        growth_interval: For ``backoff``, else None.
        skipped: Share of the recorded steps with finite gradients that it skips.
        lost: Share of Σ|g| the worst layer loses to zero in a step, on average over the late ones
            that are not skipped.
        fits: Whether both are tolerable.
    """

    method: Method
    scale: float
    growth_interval: int | None
    skipped: float
    lost: float
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "method": self.method,
            "init_scale": self.scale,
            "growth_interval": self.growth_interval,
            "skipped": self.skipped,
            "lost": self.lost,
            "fits": self.fits,
        }


@dataclass(frozen=True, eq=False)
class Course:
    """The recorded steps and what may follow them, as far as a scaler is concerned.

    Attributes:
        steps: int64 (n,).
        maxima: float64 (n,), largest unscaled |gradient|, infinite where one was not finite.
        late: bool (n,), the steps whose losses count.
        below: Of each layer that decides, float64 (n, bins + 1): Σ|g| under the first j bins.
        first: int64 (n,), exponent of the first bin.
        target: The format.
        tolerated: Share of Σ|g| that may be lost.
    """

    steps: NDArray[np.int64]
    maxima: NDArray[np.float64]
    late: NDArray[np.bool_]
    below: tuple[NDArray[np.float64], ...]
    first: NDArray[np.int64]
    target: FloatFormat
    tolerated: float

    def judge(
        self, method: Method, scaler: Scaler, interval: int | None = None, headroom: int = 0
    ) -> Candidate:
        """Replay a scaler.

        Args:
            method: Its name.
            scaler: Its state at the first step.
            interval: Its growth interval.
            headroom: Powers of two the maxima are raised by.
        """
        with np.errstate(over="ignore"):  # of float64 gradients, which overflow then in any case
            maxima = np.ldexp(self.maxima, headroom)
        played = play(self.steps, maxima, scaler, self.target)
        finite = np.isfinite(self.maxima)
        skipped = float(played.overflow[finite].mean()) if finite.any() else 0.0
        counted = ~played.overflow & finite & self.late
        exponents = np.floor(np.log2(played.scale)).astype(int)
        lost = max((self._lost(table, exponents, counted) for table in self.below), default=0.0)
        fits = skipped <= TOLERATED_SKIPS and lost <= self.tolerated
        return Candidate(method, scaler.scale, interval, skipped, lost, fits)

    def _lost(
        self,
        below: NDArray[np.float64],
        exponents: NDArray[np.int64],
        counted: NDArray[np.bool_],
    ) -> float:
        if not counted.any():  # every late step skipped: nothing of them arrived
            return 1.0
        column = np.clip(self.target.zero_exponent - exponents - self.first, 0, below.shape[1] - 1)
        lost = below[np.arange(len(below)), column]
        return float(share(lost, below[:, -1])[counted].mean())


def course_of(
    steps: NDArray[np.int64],
    maxima: NDArray[np.float64],
    layers: Sequence[ExponentHistogram],
    target: FloatFormat,
    tolerated: float,
    sink: int = 0,
) -> Course:
    """Prepare a replay.

    Args:
        steps: See ``Course``.
        maxima: See ``Course``.
        layers: Histograms by step of the layers that decide.
        target: See ``Course``.
        tolerated: See ``Course``.
        sink: Powers of two by which gradients shrank over the recording. If any, the late steps
            come once more, that much smaller.
    """
    none = np.zeros((len(steps), 1))
    below = [np.concatenate([none, np.cumsum(h.sums, axis=1)], axis=1) for h in layers]
    first = np.full(len(steps), layers[0].first if layers else 0)
    late = steps >= np.median(steps)
    again = np.flatnonzero(late) if sink > 0 else np.zeros(0, int)
    behind = int(steps[-1] - steps[again[0]]) + 1 if again.size else 0
    return Course(
        steps=np.concatenate([steps, steps[again] + behind]),
        maxima=np.concatenate([maxima, np.ldexp(maxima[again], -sink)]),
        late=np.concatenate([late, late[again]]),
        below=tuple(np.concatenate([table, table[again]]) for table in below),
        first=np.concatenate([first, first[again] - sink]),
        target=target,
        tolerated=tolerated,
    )


def choose_method(
    course: Course, exponent: int, safe: int, upper: int, headroom: int, scaled: bool
) -> tuple[Candidate, tuple[Candidate, ...]]:
    """The simplest method that does, or else the one that comes closest.

    Args:
        course: The recorded steps.
        exponent: log2 of the scale at which losses no longer matter, as far as there is room.
        safe: log2 of the largest scale that keeps the headroom.
        upper: log2 of the largest scale at which nothing recorded overflows.
        headroom: Powers of two that a scale which cannot adapt keeps free.
        scaled: Whether a scale is wanted at all.

    Returns:
        The choice, and every candidate that was judged, simplest first.
    """
    judged: list[Candidate] = []
    for candidate in _candidates(course, exponent, safe, upper, headroom, scaled):
        judged.append(candidate)
        if candidate.fits:
            return candidate, tuple(judged)
    # min() takes the first of equals, which is the simplest.
    closest = min(judged, key=lambda c: max(c.skipped / TOLERATED_SKIPS, c.lost / course.tolerated))
    return closest, tuple(judged)


def _candidates(
    course: Course, exponent: int, safe: int, upper: int, headroom: int, scaled: bool
) -> Iterator[Candidate]:
    if not scaled:
        # What is lost was found not to matter, over all late steps together; judged step by step,
        # one with small gradients would count as much as one that moves the weights.
        none = course.judge("none", ConstantScale(1.0), headroom=headroom)
        yield replace(none, fits=none.skipped <= TOLERATED_SKIPS)
    start = min(exponent, safe)
    for power in range(start, max(start, min(safe, int(math.log2(LARGEST_SCALE)))) + 1):
        yield course.judge("constant", ConstantScale(2.0**power), headroom=headroom)
    first = 2.0 ** min(exponent, upper)
    least = min(1.0, first)
    for interval in INTERVALS:
        scaler = Backoff(first, growth_interval=interval, min_scale=least, max_scale=LARGEST_SCALE)
        yield course.judge("backoff", scaler, interval)
    yield course.judge("lognormal", LogNormal(first, min_scale=least, max_scale=LARGEST_SCALE))


def describe_choice(chosen: Candidate, judged: Sequence[Candidate]) -> str:
    """Why this method, in a clause."""
    outcome = f"skips {chosen.skipped:.1%} of the steps and loses {chosen.lost:.2%}"
    constants = [c for c in judged if c.method == "constant"]
    if not chosen.fits:
        return f"no method does; the closest, {chosen.method} from {chosen.scale:g}, {outcome}"
    if chosen.method == "none":
        return "no step comes near an overflow"
    if chosen.method == "constant":
        return f"a constant scale of {chosen.scale:g} is enough: with headroom it {outcome}"
    name = "LogNormal" if chosen.method == "lognormal" else f"Backoff({chosen.growth_interval})"
    if not constants:
        return f"{name} {outcome} in the replay"
    best = min(constants, key=lambda c: c.skipped + c.lost)
    return (
        f"{name} {outcome} in the replay; the best constant scale, {best.scale:g}, would with "
        f"headroom skip {best.skipped:.1%} and lose {best.lost:.2%}"
    )
