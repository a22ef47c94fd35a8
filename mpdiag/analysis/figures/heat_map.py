"""The gradients of the layers that lose most as one picture, before and after the loss scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.figures.figure import at_scale
from mpdiag.display import svg
from mpdiag.display.wording import layer_name

if TYPE_CHECKING:
    from mpdiag.analysis.figures.figure import FigureTable, Key
    from mpdiag.analysis.layers import Layers
    from mpdiag.numerics.formats import FloatFormat

MOST_LAYERS = 14
MOST_EXPONENTS = 72


def gradients_svg(
    layers: Layers, figures: FigureTable, fmt: FloatFormat, scale: float, *, ground: str = ""
) -> str:
    """Activation gradients by layer and power of two, without a loss scale and at the plan's.

    Args:
        layers: Over all recorded steps, of any kinds.
        figures: The analysis'; they order the layers and name what is lost.
        fmt: The format that the gradients are kept in.
        scale: The recommended loss scale; at 1 there is one map alone.
        ground: Behind the picture, as ``svg.heat_maps`` has it.

    Returns:
        "" where no activation gradient has a value other than 0.
    """
    gradients = layers.of_kind("activation_grad")
    place = {str(name): i for i, name in enumerate(gradients.names)}
    order = [place[n] for n in figures.layers() if n in place] or list(range(len(gradients)))
    rows = order[:MOST_LAYERS]
    h = gradients.histograms
    occupied = np.flatnonzero(h.counts[rows].sum(axis=0)) if rows else np.array([], int)
    if occupied.size == 0:
        return ""
    ranges = [_range(figures, fmt, k) for k in dict.fromkeys([0, round(math.log2(scale))])]
    low, high = int(h.exponents[occupied[0]]), int(h.exponents[occupied[-1]]) + 2
    low = min(low, *(math.floor(r.zero) - 2 for r in ranges))
    high = max([high, *(math.ceil(r.top) + 3 for r in ranges if r.top < high + 24)])
    low = max(low, high - MOST_EXPONENTS, int(h.exponents[0]))
    high = min(high, int(h.exponents[-1]) + 1)
    first = low - int(h.exponents[0])
    counts = h.counts[rows][:, first : first + high - low]
    names = [layer_name(str(gradients.names[i])) for i in rows]
    return svg.heat_maps(names, counts.tolist(), low, ranges, ground=ground)


def _range(figures: FigureTable, fmt: FloatFormat, exponent: int) -> svg.Range:
    """A format's range at a loss scale of 2^exponent, with what it loses of all values."""
    key: Key = "all-values" if exponent == 0 else "all-values-scaled"
    figure = figures.find(key)
    phrase = at_scale(2.0**exponent)
    lost = "" if figure is None else f": {figure.said} become 0"
    return svg.Range(
        f"{phrase[:1].upper()}{phrase[1:]}{lost}",
        fmt.zero_exponent - exponent,
        fmt.min_exponent - exponent,
        math.log2(fmt.overflow_threshold) - exponent,
    )
