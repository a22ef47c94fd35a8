"""How to scale the loss: every method is replayed over the recording, the simplest that works wins.

Simplest first: no scale, then what each class in ``SCALERS`` proposes, in that order. A method works
when it skips few steps and loses little of the gradients' sum where most is lost. Training goes on
after a recording ends: a scale that cannot adapt must also hold maxima raised by the headroom, and
where gradients have been shrinking, every method is replayed on over steps that shrink as much again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import share
from mpdiag.analysis.scaling.replay import play
from mpdiag.analysis.scaling.windows import Window, late_windows
from mpdiag.display.wording import counted, percent, scale_text, spoken_layer
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.numerics.loss_scalers import SCALERS, ConstantScale, Scaler, ScaleRange
from mpdiag.plan import NO_SCALE

TOLERATED_SKIPS = 0.01
"""Share of the replayed steps a method may skip; ``Backoff`` at its defaults skips 0.0005."""


@dataclass(frozen=True)
class ScalingCandidate:
    """A method, and what it would have done to the recorded steps.

    Attributes:
        method: Its name, as in a plan.
        scaler: Its settings, at the first step.
        skipped: Share of the recorded steps with finite gradients that it skips.
        lost: Share of Σ|g| the worst layer loses to zero in a step, on average over the steps of the
            late part that loses most, those that are not skipped.
        fits: Whether both are tolerable.
        skips, steps: Of how many replayed steps with finite gradients how many it skips.
        repeated: How many of these are late steps once more, with gradients ``smaller`` powers of two
            below the recorded ones; the others are the recorded steps.
        smaller: See ``repeated``.
        layer, window: The layer and the late part that ``lost`` is of; None where no layer decides.
    """

    method: str
    scaler: Scaler
    skipped: float
    lost: float
    fits: bool
    skips: int = 0
    steps: int = 0
    repeated: int = 0
    smaller: int = 0
    layer: str | None = None
    window: Window | None = None

    @property
    def scale(self) -> float:
        """The scale it begins with."""
        return self.scaler.scale

    @property
    def constant(self) -> bool:
        """Whether it scales by one number that never changes."""
        return self.method != NO_SCALE and not self.scaler.adaptive

    def to_json(self) -> dict[str, Any]:
        """As the plan's evidence holds it."""
        return {
            "method": self.method,
            "init_scale": self.scale,
            "growth_interval": self.scaler.to_plan().get("growth_interval"),
            "skipped": self.skipped,
            "lost": self.lost,
            "fits": self.fits,
        }


@dataclass(frozen=True, eq=False)
class GradientHistory:
    """The recorded steps and those that may follow them, as far as a scaler is concerned.

    Attributes:
        steps: int64 (n,).
        maxima: float64 (n,), largest unscaled |gradient|, infinite where one was not finite.
        late: bool (parts, n), the steps whose losses count, in each part of the training.
        below: Of each layer that decides, float64 (n, bins + 1): Σ|g| under the first j bins.
        first: int64 (n,), exponent of the first bin.
        target: The format.
        tolerated: Share of Σ|g| that may be lost.
        names: The layers that decide; empty if they were not named.
        parts: The parts of the training that ``late`` is of.
        recorded: How many of the steps were recorded, the first ones; the others repeat late ones.
        shrinkage: Powers of two by which the repeated gradients are smaller.
    """

    steps: NDArray[np.int64]
    maxima: NDArray[np.float64]
    late: NDArray[np.bool_]
    below: tuple[NDArray[np.float64], ...]
    first: NDArray[np.int64]
    target: FloatFormat
    tolerated: float
    names: tuple[str, ...]
    parts: tuple[Window, ...]
    recorded: int
    shrinkage: int

    def judge(self, scaler: Scaler, headroom: int = 0) -> ScalingCandidate:
        """Replay a scaler.

        Args:
            scaler: Its state at the first step.
            headroom: Powers of two the maxima are raised by.
        """
        with np.errstate(over="ignore"):  # float64 maxima near the limit overflow in any case
            maxima = np.ldexp(self.maxima, headroom)
        played = play(self.steps, maxima, scaler, self.target)
        finite = np.isfinite(self.maxima)
        known, skips = int(finite.sum()), int(played.overflow[finite].sum())
        exponents = np.floor(np.log2(played.scale)).astype(int)
        losses = [
            (self._lost(table, exponents, ~played.overflow & finite & part), layer, window)
            for layer, table in zip(self.names or [None] * len(self.below), self.below, strict=True)
            for window, part in zip(self.parts, self.late, strict=True)
        ]
        lost, layer, window = max(losses, key=lambda found: found[0], default=(0.0, None, None))
        return ScalingCandidate(
            method=scaler.name,
            scaler=scaler,
            skipped=skips / known if known else 0.0,
            lost=lost,
            fits=tolerable(skips, known) and lost <= self.tolerated,
            skips=skips,
            steps=known,
            repeated=int(finite[self.recorded :].sum()),
            smaller=self.shrinkage,
            layer=layer,
            window=window,
        )

    def _lost(
        self, below: NDArray[np.float64], exponents: NDArray[np.int64], counted: NDArray[np.bool_]
    ) -> float:
        if not counted.any():  # every late step is skipped: no gradient arrives
            return 1.0
        column = np.clip(self.target.zero_exponent - exponents - self.first, 0, below.shape[1] - 1)
        lost = below[np.arange(len(below)), column]
        return float(share(lost, below[:, -1])[counted].mean())


def tolerable(skips: int, steps: int) -> bool:
    """Whether a method may skip so many of the replayed steps: 1 %, and one in any case.

    One skip costs a training nothing, and one in 34 recorded steps does not show more than 1 % of all.
    """
    return skips <= max(1.0, TOLERATED_SKIPS * steps)


def gradient_history(
    steps: NDArray[np.int64],
    maxima: NDArray[np.float64],
    layers: Sequence[ExponentHistogram],
    target: FloatFormat,
    tolerated: float,
    shrinkage: int = 0,
    windows: Sequence[Window] = (),
    names: Sequence[str] = (),
) -> GradientHistory:
    """Prepare a replay.

    Args:
        steps: See ``GradientHistory``.
        maxima: See ``GradientHistory``.
        layers: Histograms by step of the layers that decide.
        target: See ``GradientHistory``.
        tolerated: See ``GradientHistory``.
        shrinkage: Powers of two by which gradients shrank over the recording. If any, the late
            steps are repeated at the end, smaller by as much.
        windows: The late parts of the training, the longest first; by default the later half.
        names: What the layers are called.
    """
    none = np.zeros((len(steps), 1))
    below = [np.concatenate([none, np.cumsum(h.sums, axis=1)], axis=1) for h in layers]
    first = np.full(len(steps), layers[0].first if layers else 0)
    parts = tuple(windows) or late_windows(steps)[:1]
    late = np.stack([part.holds(steps) for part in parts])
    again = np.flatnonzero(late[0]) if shrinkage > 0 else np.zeros(0, int)
    behind = int(steps[-1] - steps[again[0]]) + 1 if again.size else 0
    return GradientHistory(
        steps=np.concatenate([steps, steps[again] + behind]),
        maxima=np.concatenate([maxima, np.ldexp(maxima[again], -shrinkage)]),
        late=np.concatenate([late, late[:, again]], axis=1),
        below=tuple(np.concatenate([table, table[again]]) for table in below),
        first=np.concatenate([first, first[again] - shrinkage]),
        target=target,
        tolerated=tolerated,
        names=tuple(names),
        parts=parts,
        recorded=len(steps),
        shrinkage=shrinkage,
    )


@dataclass(frozen=True)
class MethodChoice:
    """The method chosen, and every candidate that was replayed, the simplest first."""

    chosen: ScalingCandidate
    judged: tuple[ScalingCandidate, ...]

    def describe(self) -> str:
        """Why this method, in a clause."""
        chosen, scale = self.chosen, scale_text(self.chosen.scale)
        outcome = f"{_skips(chosen)}{_loses(chosen)}"
        if not chosen.fits:
            return (
                f"no scaling method is good enough; {_replayed(chosen)}, the closest, {chosen.method} "
                f"from {scale}, {outcome}"
            )
        if chosen.method == NO_SCALE:
            return "no recorded step comes near an overflow"
        if chosen.constant:
            replayed = f"{_replayed(chosen)}, with headroom"
            return f"a constant scale of {scale} is enough: {replayed}, it {outcome}"
        described = f"{_replayed(chosen)}, {chosen.scaler.describe()} {outcome}"
        constants = [c for c in self.judged if c.constant]
        if not constants:
            return described
        best = min(constants, key=lambda c: c.skipped + c.lost)
        return (
            f"{described}; the best constant scale, {scale_text(best.scale)}, with headroom "
            f"{_skips(best)}{_loses(best)}"
        )


def _skips(candidate: ScalingCandidate) -> str:
    """How many steps a method skips, in words."""
    if not candidate.skips:
        return "skips no step"
    return f"skips {candidate.skips:,} of {counted(candidate.steps, 'step')}"


def _replayed(candidate: ScalingCandidate) -> str:
    """What a method was tried on: the recorded gradients, and smaller ones if these shrank."""
    smaller = f", also {2**candidate.smaller:,} times smaller" if candidate.repeated else ""
    return f"replayed over the recorded gradients{smaller}"


def _loses(candidate: ScalingCandidate) -> str:
    """What a method loses, in words; empty if no layer was looked at."""
    if candidate.layer is None or candidate.window is None:
        return ""
    return (
        f" and loses {percent(candidate.lost)} of {spoken_layer(candidate.layer)}'s gradient on average "
        f"{candidate.window.when}"
    )


def choose_method(
    history: GradientHistory, found: ScaleRange, *, headroom: int, scaled: bool
) -> MethodChoice:
    """The simplest method that works, or else the one that comes closest.

    Args:
        history: The recorded steps.
        found: The scales that the recording allows.
        headroom: Powers of two that a scale which cannot adapt keeps free.
        scaled: Whether a scale is wanted at all.
    """
    judged: list[ScalingCandidate] = []
    for candidate in _candidates(history, found, headroom, scaled):
        judged.append(candidate)
        if candidate.fits:
            return MethodChoice(candidate, tuple(judged))
    # min() takes the first of equals, which is the simplest.
    closest = min(
        judged, key=lambda c: max(c.skipped / TOLERATED_SKIPS, c.lost / history.tolerated)
    )
    return MethodChoice(closest, tuple(judged))


def _candidates(
    history: GradientHistory, found: ScaleRange, headroom: int, scaled: bool
) -> Iterator[ScalingCandidate]:
    if not scaled:
        # What is lost was found not to matter, over all late steps together; judged step by step,
        # one with small gradients would count as much as one that moves the weights.
        none = history.judge(ConstantScale(1.0), headroom)
        # Without a scale nothing checks for infinities, so no step may come near one.
        yield replace(none, method=NO_SCALE, fits=none.skips == 0)
    for kind in SCALERS.values():
        for scaler in kind.proposals(found):
            yield history.judge(scaler, 0 if kind.adaptive else headroom)
