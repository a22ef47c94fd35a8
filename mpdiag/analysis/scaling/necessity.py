"""Whether a loss scale is needed: what would be lost without one, layer by layer.

What "matters" is calibrated against trainings that were run both ways, see ``NEEDED``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.numerics.formats import FP16, FloatFormat
from mpdiag.numerics.loss_scalers import LARGEST_SCALE

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
MATTERS = 0.01
"""Share of Σ|g| in the worst layer below which what is lost no longer matters; from there up to
``NEEDED`` a scale is advised as a harmless insurance, and not called needed."""
NEGLIGIBLE = 0.001
"""The share the recommended scale aims at, where the interval has room."""
LARGEST_EXPONENT = int(math.log2(LARGEST_SCALE))


@dataclass(frozen=True, eq=False)
class Losses:
    """What each layer's late gradients lose to zero.

    Attributes:
        names: object (layers,).
        sums: float64 (layers, ``LARGEST_EXPONENT`` + 1), see ``lost_by_scale``.
        values: float64 (layers,), see ``values_lost``, at scale 1.
    """

    names: NDArray[np.object_]
    sums: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, late: Layers, target: FloatFormat) -> Losses:
        """The losses of the activation gradients of late steps."""
        return cls(late.names, lost_by_scale(late, target), values_lost(late, target))

    def first_below(self, threshold: float) -> int:
        """Smallest exponent at which no layer loses more of its sum than the threshold."""
        worst = self.sums.max(axis=0, initial=0.0)
        below = np.flatnonzero(worst <= threshold)
        return int(below[0]) if below.size else LARGEST_EXPONENT

    def worst_at(self, *exponents: int) -> list[str]:
        """The layers that lose most of their sum at some scales, in the layers' order."""
        if len(self.names) == 0:
            return []
        worst = {int(np.argmax(self.sums[:, max(0, k)])) for k in exponents}
        return [str(self.names[i]) for i in sorted(worst)]


@dataclass(frozen=True)
class Necessity:
    """How sure it is that a scale is needed, and the layer that decides it.

    Attributes:
        need: See ``LossScalePlan``.
        layer: The layer; None where no late gradient was recorded.
        sum_lost: Share of Σ|g| that it loses at scale 1.
        values_lost: Share of its values, where these decide and not the sum alone; else None.
    """

    need: LossScaleNeed
    layer: str | None
    sum_lost: float
    values_lost: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether a scale is at least advisable."""
        return self.need != "not needed"


def lost_by_scale(layers: Layers, target: FloatFormat = FP16) -> NDArray[np.float64]:
    """Share of Σ|x| each layer loses to zero, at scales 2^0 … 2^``LARGEST_EXPONENT``.

    Returns:
        float64 (layers, ``LARGEST_EXPONENT`` + 1).
    """
    h = layers.histograms
    whole = h.abs_sum().value
    columns = [
        share(h.abs_sum(target.zero_exponent - k).value, whole) for k in range(LARGEST_EXPONENT + 1)
    ]
    return np.stack(columns, axis=1) if len(layers) else np.zeros((0, LARGEST_EXPONENT + 1))


def values_lost(
    layers: Layers, target: FloatFormat = FP16, exponent: int = 0
) -> NDArray[np.float64]:
    """Share of its non-zero values that each layer loses to zero at the scale 2^exponent."""
    h = layers.histograms
    return share(h.lost_to_zero(target, exponent).value, h.nonzero)


def needs_scale(values: NDArray[np.float64], sums: NDArray[np.float64]) -> bool:
    """Whether layers that lose these shares of their values and of Σ|g| make a scale needed."""
    return bool((sums >= NEEDED).any()) or _worst_crowd(values, sums) is not None


def _worst_crowd(values: NDArray[np.float64], sums: NDArray[np.float64]) -> int | None:
    """The layer that loses nearly all its values and most of its sum, if any does."""
    rows = np.flatnonzero((values >= NEEDED_VALUES) & (sums >= NEEDED_SUM))
    return int(rows[np.argmax(sums[rows])]) if rows.size else None


def necessity_of(losses: Losses) -> Necessity:
    """Whether a scale is needed: by the layer that loses most, or by one that loses most values."""
    if len(losses.names) == 0:
        return Necessity("not needed", None, 0.0)
    sums = losses.sums[:, 0]
    most = int(np.argmax(sums))
    crowded = _worst_crowd(losses.values, sums)
    if crowded is not None and sums[most] < NEEDED:
        layer, lost = losses.names[crowded], float(sums[crowded])
        return Necessity("needed", layer, lost, float(losses.values[crowded]))
    need: LossScaleNeed = "not needed"
    if needs_scale(losses.values, sums):
        need = "needed"
    elif sums[most] >= MATTERS:
        need = "advisable"
    return Necessity(need, losses.names[most], float(sums[most]))


def describe_necessity(necessity: Necessity, underflow: float, target: FloatFormat) -> str:
    """Why a scale is needed or not, in a clause."""
    where, lost = necessity.layer or "the model's output", necessity.sum_lost
    if necessity.values_lost is not None:
        return (
            f"without a scale {target.label} loses {necessity.values_lost:.0%} of the gradient's "
            f"values in {where}, {lost:.1%} of their sum: many small contributions in one direction, "
            "which training missed"
        )
    if necessity.need == "needed":
        return (
            f"without a scale {target.label} loses {lost:.0%} of the gradient's sum in {where}: "
            "trainings that lost as much failed"
        )
    if necessity.need == "advisable":
        return (
            f"{target.label} loses {lost:.1%} of the gradient's sum in {where}; trainings that lost "
            "as much reached the same result, and a scale costs nothing"
        )
    values = f"{underflow:.1%}" if underflow == 0 or underflow >= 5e-4 else "< 0.1%"
    return (
        f"no layer loses more than {max(lost, 1e-4):.2%} of its gradient's sum ({values} of all "
        "values, the smallest), which does not matter"
    )
