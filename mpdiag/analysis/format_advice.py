"""What every format would lose, overall and per layer, at the best power-of-two scale."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.numerics.formats import FP32, TARGETS, FloatFormat
from mpdiag.plan import LayerFormat
from mpdiag.runs.schema import KINDS

CANDIDATES = tuple(sorted(TARGETS, key=lambda fmt: fmt.bits))
"""From narrow to wide."""
TOLERATED = 0.01
"""Share of Σ|x| that may be lost to zero for a format to be called fit."""


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
    """The narrowest fit format of each layer's activations and activation gradients."""
    advice = []
    for kind in ("activation", "activation_grad"):
        part = layers.of_kind(kind)
        if len(part) == 0:
            continue
        h = part.histograms
        whole = h.abs_sum().value
        chosen = np.full(len(part), FP32.name, dtype=object)
        shares = np.zeros(len(part))
        for fmt in reversed(CANDIDATES):
            exponents = _exponents(part, fmt, gradient_exponent)
            for k in np.unique(exponents):
                rows = np.flatnonzero(exponents == k)
                part_h = h[rows]
                lost = share(part_h.abs_sum(fmt.zero_exponent - int(k)).value, whole[rows])
                fits = (lost <= TOLERATED) & (part_h.overflow(fmt, int(k)).upper == 0)
                chosen[rows[fits]] = fmt.name
                shares[rows[fits]] = lost[fits]
        advice += [
            LayerFormat(
                name=str(part.names[i]),
                kind=kind,
                format=str(chosen[i]),
                reason="the narrowest format that keeps 99 % of Σ|x| and does not overflow",
                evidence={"sum_lost": float(shares[i]), "absmax": float(h.absmax[i])},
            )
            for i in range(len(part))
        ]
    return tuple(advice)


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
