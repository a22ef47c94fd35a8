"""Whether a loss scale is needed: what would be lost without one, layer by layer.

What "matters" is calibrated against trainings that were run both ways, see ``NEEDED``.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.figures import FigureTable
from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.scaling.movement import AT_STAKE, UNKNOWN, Movement
from mpdiag.analysis.scaling.windows import Window
from mpdiag.display.wording import percent, spoken_layer, spoken_layers
from mpdiag.numerics.formats import FP16, FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.numerics.loss_scalers import LARGEST_SCALE
from mpdiag.numerics.rounded import SUM_RATIO
from mpdiag.plan import LossScaleNeed

NEEDED = 0.25
"""Share of Σ|g| that the worst layer loses, late in training, from which a scale is *needed*.

Emulated FP16 trainings on real data, each against its FP32 twin: harmless at 0.0001 (digits CNN),
0.03 (LSTM language model) and 0.16 (denoiser on photographs, which loses 30 % of all its values);
harmful at 0.29 (Multibox SSD, average precision .85 → .17) and 0.59 (the denoiser at full size).
Counting values alone would rank the harmless denoiser beside the detector that fails.
"""
NEEDED_VALUES, NEEDED_SUM = 0.75, 0.05
"""Shares of a layer's values and of its Σ|g| that, lost *together*, make a scale needed, too.

Where nearly all values are lost, and still weigh something, they are many small contributions in one
direction, and the values that are left do not make up for them: the softmax of a language model over
8,000 words loses 90 % of its values but 7 % of their sum, and its perplexity went from 311 to 549. The
denoiser that took no harm loses 48 % and 16 %; a language model over 6,000 words that took none, 93 %
and 3 %.
"""
SHOWN = "in our reference trainings, losing this much hurt"
"""What is known of losses from ``NEEDED`` on: of those above, and of no others."""
MATTERS = 0.01
"""Share of Σ|g| in the worst layer below which what is lost no longer matters; from there up to
``NEEDED`` a scale is recommended, and not called needed."""
NEGLIGIBLE = 0.001
"""The share the recommended scale aims at, where the interval has room."""
LARGEST_EXPONENT = int(math.log2(LARGEST_SCALE))
SMALLEST_EXPONENT = -LARGEST_EXPONENT
"""No scale below 2^-24 is recommended: gradients that need a smaller one are those of a training that
diverges."""


@dataclass(frozen=True, eq=False)
class Losses:
    """What each layer's gradients lose to zero, in each late part of the training.

    Attributes:
        parts: The gradients of each part that move weights, see ``movement.felt``.
        movements: How far parameters move in each part.
        target: The format.
        first: log2 of the smallest scale that is looked at, 0 or below.
        names: object (rows,), the layers of all parts, one part after the other.
        sums: float64 (rows, ``LARGEST_EXPONENT`` + 1 - first), see ``lost_by_scale``.
    """

    parts: tuple[Layers, ...]
    movements: tuple[Movement, ...]
    target: FloatFormat
    first: int
    names: NDArray[np.object_]
    sums: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        parts: Sequence[Layers],
        movements: Sequence[Movement],
        target: FloatFormat,
        first: int = 0,
    ) -> "Losses":
        """The losses of the activation gradients of late parts of a training."""
        names = [part.names for part in parts]
        sums = [lost_by_scale(part, target, first) for part in parts]
        return cls(
            tuple(parts),
            tuple(movements),
            target,
            first,
            np.concatenate(names) if names else np.zeros(0, object),
            np.concatenate(sums) if sums else np.zeros((0, LARGEST_EXPONENT + 1 - first)),
        )

    def first_below(self, threshold: float) -> int:
        """Smallest exponent at which no layer loses more of its sum than the threshold, in any part."""
        worst = self.sums.max(axis=0, initial=0.0)
        below = np.flatnonzero(worst <= threshold)
        return int(below[0]) + self.first if below.size else LARGEST_EXPONENT

    def out_of_reach(self, exponent: int) -> frozenset[str]:
        """The layers that lose as much at a scale as without one, and so much that it may matter.

        No scale up to this one is of use to them.
        """
        if len(self.names) == 0 or self.first > 0:
            return frozenset()
        unscaled, scaled = (self.sums[:, k - self.first] for k in (0, exponent))
        lost = (unscaled >= NEEDED) & (scaled >= unscaled - MATTERS)
        return frozenset(map(str, self.names[lost]))

    def without(self, layers: Collection[str]) -> "Losses":
        """The same without some layers."""
        parts = [part.select(~np.isin(part.names, [*layers])) for part in self.parts]
        return Losses.of(parts, self.movements, self.target, self.first)

    def worst_at(self, *exponents: int) -> list[str]:
        """The layers that lose most of their sum at some scales, in the layers' order."""
        if len(self.names) == 0:
            return []
        columns = [min(max(self.first, k), LARGEST_EXPONENT) - self.first for k in exponents]
        worst = {int(np.argmax(self.sums[:, column])) for column in columns}
        return list(dict.fromkeys(str(self.names[i]) for i in sorted(worst)))

    def worst_row(self, exponent: int) -> tuple[int, str] | None:
        """The part and the layer that loses most of its sum at a scale, the first of equals."""
        if len(self.names) == 0 or not self.first <= exponent <= LARGEST_EXPONENT:
            return None
        row = int(np.argmax(self.sums[:, exponent - self.first]))
        part = int(np.searchsorted(np.cumsum([len(p) for p in self.parts]), row, side="right"))
        return part, str(self.names[row])

    def harmful_at(self, exponent: int) -> bool:
        """Whether trainings that lost as much as this one would at a scale have failed."""
        if not self.first <= exponent <= LARGEST_EXPONENT:
            return exponent < self.first
        return any(
            necessity_of(part, self.target, movement, exponent).need == "needed"
            for part, movement in zip(self.parts, self.movements, strict=True)
        )


@dataclass(frozen=True)
class WeightsLost:
    """What all gradients of weights together lose to zero.

    Attributes:
        share: Of their Σ|g|, at scale 1.
        window: The late part of the training that loses most.
        keeps: log2 of the smallest scale at which no late part loses more than ``NEGLIGIBLE``.
        keeps_surely: The same, were the values rounded after they were lost.
    """

    share: float
    window: Window
    keeps: int
    keeps_surely: int


@dataclass(frozen=True)
class Necessity:
    """How sure it is that a scale is needed, and the layer that decides it.

    Attributes:
        need: See ``LossScalePlan``.
        layer: The layer; None where no late gradient was recorded.
        sum_lost: Share of Σ|g| that it loses at scale 1.
        values_lost: Share of its values, where these decide and not the sum alone; else None.
        overflowing: In how many of ``steps`` recorded steps a gradient overflows at scale 1.
        steps: How many steps with finite gradients were recorded.
        when: The part of the training that decides, as a phrase; empty if it is not known.
        weights: What all weights' gradients together lose, where this decides.
        unmoved: Layers that lose more than this one, but move no weights.
        beyond: Layers that lose as much at each admissible scale as without one.
        moved: Σ|Δw| over Σ|w| of the layers that lose as much as those of trainings that failed,
            where it is too small for a scale to be needed; else None.
    """

    need: LossScaleNeed
    layer: str | None
    sum_lost: float
    values_lost: float | None = None
    overflowing: int = 0
    steps: int = 0
    when: str = ""
    weights: WeightsLost | None = None
    unmoved: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    moved: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether a scale is at least advisable."""
        return self.need != "not needed"


def weights_lost(late: Sequence[tuple[Window, Layers]], target: FloatFormat) -> WeightsLost | None:
    """What all gradients of weights together lose without a scale, where it makes one needed.

    A layer's own gradients hide it where a step has two backward passes, as for the gradient of a
    gradient: those of the first may be the larger ones, and only those of the second change weights.

    Args:
        late: Gradients of late parts of a training.
        target: The format.
    """
    parts = [(window, layers.of_kind("weight_grad").histograms) for window, layers in late]

    def lost(h: ExponentHistogram, exponent: int) -> float:
        gone = h.abs_sum(target.zero_exponent - exponent).value.sum()
        return float(share(gone, h.abs_sum().value.sum()))

    worst = max(parts, key=lambda part: lost(part[1], 0), default=None)
    if worst is None or lost(worst[1], 0) < NEEDED:
        return None

    def keeps(threshold: float) -> int:
        exponents = range(LARGEST_EXPONENT + 1)
        found = (k for k in exponents if all(lost(h, k) <= threshold for _, h in parts))
        return next(found, LARGEST_EXPONENT)

    surely = keeps(NEGLIGIBLE / SUM_RATIO)
    return WeightsLost(lost(worst[1], 0), worst[0], keeps(NEGLIGIBLE), surely)


def lost_by_scale(
    layers: Layers, target: FloatFormat = FP16, first: int = 0
) -> NDArray[np.float64]:
    """Share of Σ|x| each layer loses to zero, at scales 2^``first`` … 2^``LARGEST_EXPONENT``.

    Returns:
        float64 (layers, ``LARGEST_EXPONENT`` + 1 - first).
    """
    exponents = range(first, LARGEST_EXPONENT + 1)
    if len(layers) == 0:
        return np.zeros((0, len(exponents)))
    h = layers.histograms
    whole = h.abs_sum().value
    columns = [share(h.abs_sum(target.zero_exponent - k).value, whole) for k in exponents]
    return np.stack(columns, axis=1)


def values_lost(
    layers: Layers, target: FloatFormat = FP16, exponent: int = 0
) -> NDArray[np.float64]:
    """Share of its non-zero values that each layer loses to zero at the scale 2^exponent."""
    h = layers.histograms
    return share(h.lost_to_zero(target, exponent).value, h.nonzero)


def lost_as_much(
    values: NDArray[np.float64], sums: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which layers lose as much as layers of trainings that failed: by their sum, by their values."""
    return sums >= NEEDED, (values >= NEEDED_VALUES) & (sums >= NEEDED_SUM)


def necessity_of(
    late: Layers, target: FloatFormat, movement: Movement = UNKNOWN, exponent: int = 0
) -> Necessity:
    """Whether a scale is needed: by the layer that loses most, or by one that loses most values.

    Args:
        late: Activation gradients of a late part of the training that move weights.
        target: The format.
        movement: How far parameters move in that part.
        exponent: log2 of the scale that the gradients already have.
    """
    if len(late) == 0:
        return Necessity("not needed", None, 0.0)
    h = late.histograms
    sums = share(h.abs_sum(target.zero_exponent - exponent).value, h.abs_sum().value)
    values = values_lost(late, target, exponent)
    most = int(np.argmax(sums))
    much, crowds = lost_as_much(values, sums)
    moved = [movement.relative(str(name)) for name in late.names[much | crowds]]
    at_stake = max(moved, default=0.0) >= AT_STAKE
    if crowds.any() and not much.any() and at_stake:
        crowded = int(np.argmax(np.where(crowds, sums, -1.0)))
        layer, lost = str(late.names[crowded]), float(sums[crowded])
        return Necessity("needed", layer, lost, float(values[crowded]))
    need: LossScaleNeed = "not needed"
    if much.any() and at_stake:
        need = "needed"
    elif sums[most] >= MATTERS:
        need = "advisable"
    little = max(moved) if moved and need == "advisable" else None
    return Necessity(need, str(late.names[most]), float(sums[most]), moved=little)


def deciding_part(losses: Losses, windows: Sequence[Window]) -> tuple[Necessity, int]:
    """The part of the training that needs a scale most, and why; of equals the first."""
    judged = [
        necessity_of(part, losses.target, movement)
        for part, movement in zip(losses.parts, losses.movements, strict=True)
    ]
    if not judged:
        return Necessity("not needed", None, 0.0), -1
    at = max(range(len(judged)), key=lambda i: (_URGENCY.index(judged[i].need), -i))
    return replace(judged[at], when=f"in {windows[at].name}"), at


_URGENCY: tuple[LossScaleNeed, ...] = ("unknown", "not needed", "advisable", "needed")


def describe_necessity(necessity: Necessity, figures: FigureTable, target: FloatFormat) -> str:
    """Why a scale is needed or not, in a clause; its figures are those of the table."""
    told = [_describe(necessity, figures, target)]
    for layers, one, several in (
        (necessity.unmoved, "loses more, but moves no weights", "lose more, but move no weights"),
        (necessity.beyond, "loses as much at every scale", "lose as much at every scale"),
    ):
        if layers:
            told.append(f"{spoken_layers(layers)} {one if len(layers) == 1 else several}")
    return "; ".join(told)


def _describe(necessity: Necessity, figures: FigureTable, target: FloatFormat) -> str:
    if necessity.overflowing:
        return (
            f"without a loss scale, gradients overflow {target.label} in {necessity.overflowing:,} of "
            f"{necessity.steps:,} recorded steps"
        )
    loses = f"without a loss scale, {target.label} loses"
    gone = figures.find("all-weights-sum")
    if gone is not None:
        return f"{loses} {gone.said} of all weight gradients {gone.window.when}; {SHOWN}"
    found = figures.find("layer-sum", necessity.layer)
    if found is None:
        return "no activation gradient was recorded late in the training"
    when, layer = found.window.when, spoken_layer(found.layer)
    told = f"{loses} {found.said} of {layer}'s gradient {when}"
    if necessity.values_lost is not None:
        values = figures.said("layer-values", necessity.layer)
        return (
            f"{loses} {values} of the values in {layer}'s gradient {when}, {found.said} of its sum; "
            "the lost values are small, but point in one direction, and losing them hurts"
        )
    if necessity.need == "needed":
        return f"{told}; {SHOWN}"
    if necessity.moved is not None:
        return (
            f"{told}, but the weights there change by only {percent(necessity.moved)}; a scale is "
            "recommended, but not shown to be needed"
        )
    if necessity.need == "advisable":
        return (
            f"{told}; in our reference trainings, losing this much did no harm, and a scale costs "
            "nothing"
        )
    apart = bool(necessity.unmoved or necessity.beyond)
    if found.value == 0:
        return (
            f"without a loss scale, no {'other ' if apart else ''}layer loses any gradient {when}"
        )
    return f"{told}, the most of {'the other' if apart else 'all'} layers, but too little to matter"
