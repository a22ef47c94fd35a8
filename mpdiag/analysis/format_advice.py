"""What every format would lose, overall and per layer, at the best power-of-two scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.numerics.formats import FP32, TARGETS, FloatFormat
from mpdiag.plan import LayerFormat
from mpdiag.runs.schema import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

CANDIDATES = tuple(sorted(TARGETS, key=lambda fmt: fmt.bits))
"""From narrow to wide."""
TOLERATED = 0.01
"""Share of Σ|x| that may be lost to zero for a format to be called fit."""
TOGETHER = 0.1
"""Rounding error that all layers' formats of a kind may add up to (root of the sum of squares)."""
_NAMES = (*(fmt.name for fmt in CANDIDATES), FP32.name)


def summarise_formats(layers: Layers, gradient_exponent: int) -> dict[str, dict[str, Any]]:
    """The ``formats`` of ``mpdiag analyze --json``: shares lost, by format and kind.

    Args:
        layers: Merged histograms.
        gradient_exponent: log2 of the loss scale, applied to gradients in formats that need one;
            formats whose tensors have a scale of their own (FP8) get one for each layer.
    """
    summary: dict[str, dict[str, Any]] = {}
    for fmt in CANDIDATES:
        kinds = {}
        for kind in KINDS:
            part = layers.of_kind(kind)
            if len(part) == 0:
                continue
            lost, over, below = _losses(part, fmt, gradient_exponent)
            h = part.histograms
            kinds[kind] = {
                "underflow": float(share(lost.sum(), h.nonzero.sum())),
                "overflow": float(share(over.sum(), h.finite.sum())),
                "below_normal": float(share(below.sum(), h.nonzero.sum())),
            }
        worst = max((k["underflow"] + k["overflow"] for k in kinds.values()), default=0.0)
        summary[fmt.name] = {"worst_share_lost": worst, "kinds": kinds}
    return summary


def advise_layers(layers: Layers, gradient_exponent: int) -> tuple[LayerFormat, ...]:
    """Formats for each layer's activations and activation gradients, for when all are applied at once.

    Each is the narrowest that keeps 99 % of Σ|x| and does not overflow; where these would together round
    by more than ``TOGETHER``, the coarsest ones give way to wider formats until they do not.
    """
    advice = []
    for kind in ("activation", "activation_grad"):
        part = layers.of_kind(kind)
        if len(part) == 0:
            continue
        fits, shares = _fits(part, gradient_exponent)
        errors = _rounding_errors(part)
        chosen = _narrowest_together(fits, errors)
        rows = np.arange(len(part))
        own = errors[chosen, rows]
        together = float(np.sqrt((own**2).sum()))
        advice += [
            LayerFormat(
                name=str(part.names[i]),
                kind=kind,
                format=_NAMES[chosen[i]],
                reason="the narrowest format that keeps 99 % of Σ|x|, does not overflow, and leaves the "
                f"rounding of all layers' formats together at {together:.2g} of the values or less",
                evidence={
                    "sum_lost": float(shares[chosen[i], i]),
                    "absmax": float(part.histograms.absmax[i]),
                    "rounding": float(own[i]),
                    "rounding_together": together,
                },
            )
            for i in range(len(part))
        ]
    return tuple(advice)


def _fits(part: Layers, gradient_exponent: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Whether each of ``_NAMES`` holds each layer by its range, and the share of Σ|x| it loses."""
    h = part.histograms
    whole = h.abs_sum().value
    fits = np.zeros((len(_NAMES), len(part)), bool)
    shares = np.zeros((len(_NAMES), len(part)))
    fits[-1] = True
    for row, fmt in enumerate(CANDIDATES):
        exponents = _exponents(part, fmt, gradient_exponent)
        for k in np.unique(exponents):
            at = np.flatnonzero(exponents == k)
            few = h[at]
            shares[row, at] = share(few.abs_sum(fmt.zero_exponent - int(k)).value, whole[at])
            fits[row, at] = (shares[row, at] <= TOLERATED) & (few.overflow(fmt, int(k)).upper == 0)
    return fits, shares


def _rounding_errors(part: Layers) -> NDArray[np.float64]:
    """The largest rounding error of each of ``_NAMES`` in each layer, beside what tells values apart.

    That is the value itself, or less where no value is near 0: temperatures of 288 ± 5 differ by 10.
    """
    h = part.histograms
    least = np.where((h.zeros > 0) | ~np.isfinite(h.absmin), 0.0, h.absmin)
    apart = np.maximum(h.absmax - least, 2.0**-10 * h.absmax)
    offset = np.where(h.absmax > 0, h.absmax / np.where(apart > 0, apart, 1.0), 1.0)
    bits = np.array([fmt.mantissa_bits for fmt in (*CANDIDATES, FP32)])
    errors: NDArray[np.float64] = np.exp2(-bits[:, None] - 1.0) * offset
    return errors


def _narrowest_together(fits: NDArray[np.bool_], errors: NDArray[np.float64]) -> NDArray[np.int64]:
    """The place in ``_NAMES`` of each layer's format; the coarsest give way first."""
    chosen: NDArray[np.int64] = np.argmax(fits, axis=0)
    rows = np.arange(fits.shape[1])
    while float(np.sqrt((errors[chosen, rows] ** 2).sum())) > TOGETHER:
        coarsest = int(np.argmax(errors[chosen, rows]))
        finer = np.flatnonzero(
            fits[:, coarsest] & (errors[:, coarsest] < errors[chosen[coarsest], coarsest])
        )
        if finer.size == 0:
            break
        chosen[coarsest] = finer[0]
    return chosen


def _exponents(part: Layers, fmt: FloatFormat, gradient_exponent: int) -> Any:
    """log2 of the scale each layer is given in a format."""
    if fmt.needs_tensor_scale:
        # Its own scale: the largest power of two that keeps the maximum inside, one bit to spare.
        largest = np.maximum(part.histograms.absmax, 2.0**-120)
        return np.floor(math.log2(fmt.max) - np.log2(largest)).astype(int) - 1
    if fmt.needs_loss_scale:
        gradient = np.isin(part.kinds, ("activation_grad", "weight_grad"))
        return np.where(gradient, gradient_exponent, 0)
    return np.zeros(len(part), int)


def _losses(part: Layers, fmt: FloatFormat, gradient_exponent: int) -> tuple[Any, Any, Any]:
    exponents = _exponents(part, fmt, gradient_exponent)
    lost, over, below = (np.zeros(len(part)) for _ in range(3))
    for k in np.unique(exponents):
        rows = np.flatnonzero(exponents == k)
        h = part.histograms[rows]
        lost[rows] = h.lost_to_zero(fmt, int(k)).value
        over[rows] = h.overflow(fmt, int(k)).value
        below[rows] = h.below_normal(fmt, int(k)).value
    return lost, over, below
