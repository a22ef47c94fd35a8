"""The figures of gradients and of weight updates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.figures.figure import Figure, FigureTable
from mpdiag.analysis.layers import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpdiag.analysis.figures.figure import Key
    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.plan import MasterWeightsPlan


def layer_figures(
    late: Layers, window: Window, target: FloatFormat, exponent: int
) -> Iterator[Figure]:
    """What each layer's activation gradients lose to zero, the layer that loses most first.

    Args:
        late: The gradients of the window.
        window: The part of the training that decides.
        target: The format.
        exponent: log2 of the plan's loss scale; at 0 there is nothing to say of it.
    """
    if len(late) == 0:
        return
    keys: list[tuple[Key, Key, int]] = [("layer-sum", "layer-values", 0)]
    if exponent:
        keys.append(("layer-sum-scaled", "layer-values-scaled", exponent))
    h = late.histograms
    whole, nonzero = h.abs_sum().value, h.nonzero
    columns = [
        (
            share(h.abs_sum(target.zero_exponent - k).value, whole),
            share(h.lost_to_zero(target, k).value, nonzero),
        )
        for _, _, k in keys
    ]
    for i in np.argsort(-columns[0][0], kind="stable").tolist():
        for (of_sum, of_values, k), (sums, values) in zip(keys, columns, strict=True):
            where = {
                "window": window,
                "format": target.name,
                "scale": math.ldexp(1.0, k),
                "layer": str(late.names[i]),
                "kind": "activation_grad",
            }
            yield Figure(of_sum, float(sums[i]), "sum", **where)  # type: ignore[arg-type]
            yield Figure(of_values, float(values[i]), "values", **where)  # type: ignore[arg-type]


def pooled_figure(layers: Layers, window: Window, target: FloatFormat, exponent: int) -> Figure:
    """Share of all layers' non-zero activation gradients that is lost to zero at 2^exponent."""
    h = layers.of_kind("activation_grad").histograms
    lost, nonzero = int(h.lost_to_zero(target, exponent).value.sum()), int(h.nonzero.sum())
    return Figure(
        "all-values-scaled" if exponent else "all-values",
        float(share(lost, nonzero)),
        "values",
        window,
        target.name,
        scale=math.ldexp(1.0, exponent),
        kind="activation_grad",
        count=lost,
        of=nonzero,
    )


def update_figures(masters: MasterWeightsPlan, window: Window) -> FigureTable:
    """What 16-bit weights would not take of the recorded updates; empty if there were none."""
    known = masters.evidence
    if not known.get("changed"):
        return FigureTable()
    held = str(known["format"])
    return FigureTable(
        (
            Figure(
                "updates-swallowed",
                masters.swallowed_fraction,
                "updates",
                window,
                held,
                kind="update",
                count=known["swallowed"],
                of=known["changed"],
            ),
            Figure("path-stalled", known["path_stalled"], "path", window, held, kind="update"),
            *_vanished_weights(masters, window, held),
        )
    )


def _vanished_weights(masters: MasterWeightsPlan, window: Window, held: str) -> Iterator[Figure]:
    """The share of a parameter that a format makes 0, where masters are needed for it."""
    parameter = masters.evidence.get("vanishing_parameter")
    if parameter is not None:
        yield Figure(
            "weights-vanished",
            masters.evidence["weights_vanished"],
            "weights",
            window,
            held,
            layer=parameter,
            kind="weight",
        )
