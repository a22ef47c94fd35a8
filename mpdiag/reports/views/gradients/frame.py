"""Exponent histograms as tidy tables: where values lie, and what a format and a scale do to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.analysis.scaling.necessity import lost_by_scale
from mpdiag.numerics.formats import FloatFormat
from mpdiag.plan import LossScalePlan

SCALES = range(-10, 25)
"""Exponents of the loss scales that tables over scales show."""


def in_model_order(layers: Layers, modules: Sequence[Mapping[str, Any]]) -> Layers:
    """Layers as the model lists them, from input to output; unknown names last."""
    place = {str(module["name"]): i for i, module in enumerate(modules)}
    order = sorted(range(len(layers)), key=lambda i: place.get(str(layers.names[i]), len(place)))
    return some_layers(layers, np.array(order, np.int64))


def one_layer(layers: Layers, name: str) -> Layers:
    """One of the layers alone."""
    return some_layers(layers, np.flatnonzero(layers.names == name))


def some_layers(layers: Layers, rows: Any) -> Layers:
    """The layers of some rows, in the order of these."""
    return Layers(
        layers.kinds[rows], layers.names[rows], layers.histograms[rows], layers.steps[rows]
    )


def recommended_interval(scale: LossScalePlan) -> tuple[float, float]:
    """The recommended interval of loss scales, as exponents."""
    upper = np.inf if scale.upper is None else float(np.log2(scale.upper))
    return float(np.log2(scale.lower)), upper


def exponent_frame(layers: Layers) -> pd.DataFrame:
    """Where the values of each layer lie.

    Returns:
        ``layer``, ``exponent``, ``count``: values in (2^exponent, 2^(exponent+1)]; occupied bins
        alone.
    """
    h = layers.histograms
    rows, columns = np.nonzero(h.counts)
    return pd.DataFrame(
        {
            "layer": np.asarray(layers.names)[rows],
            "exponent": h.exponents[columns],
            "count": h.counts[rows, columns],
        }
    )


def total_frame(layers: Layers) -> pd.DataFrame:
    """The same over all layers together: ``exponent``, ``count``."""
    merged = layers.histograms.merged()
    columns = np.flatnonzero(merged.counts)
    return pd.DataFrame({"exponent": merged.exponents[columns], "count": merged.counts[columns]})


def scale_frame(layers: Layers, fmt: FloatFormat, exponent: int) -> pd.DataFrame:
    """What ``fmt`` does to each layer at a loss scale of 2^exponent.

    Returns:
        ``layer``; ``nonzero``, ``lost`` (become 0), ``overflow`` (become infinite: at least so
        many), ``overflow_most`` (at most): counts; ``lost_share`` of the non-zero values;
        ``sum_share``: of Σ|x|, an estimate; ``absmax``.
    """
    h = layers.histograms
    lost, over = h.lost_to_zero(fmt, exponent), h.overflow(fmt, exponent)
    sums = share(h.abs_sum(fmt.zero_exponent - exponent).value, h.abs_sum().value)
    return pd.DataFrame(
        {
            "layer": layers.names.astype(object),
            "nonzero": h.nonzero,
            "lost": lost.value,
            "lost_share": share(lost.value, h.nonzero),
            "sum_share": sums,
            "overflow": over.lower,
            "overflow_most": over.upper,
            "absmax": h.absmax,
        }
    )


def layer_scales_frame(layers: Layers, fmt: FloatFormat, every_step: Layers) -> pd.DataFrame:
    """What a format makes of each layer at every loss scale.

    The shares are those that the analyzer chooses the scale by, and ``rounding_error`` is its own: a
    picture and a plan that rest on one table cannot disagree.

    Args:
        layers: Histograms of the steps whose losses count.
        fmt: The format.
        every_step: Those of all recorded steps, in any of which a layer may overflow.

    Returns:
        A row for each layer and ``scale_exponent``, the layers in their order: ``lost_share`` of the
        non-zero values; ``sum_share`` of Σ|x|, an estimate; ``rounding_error``, relative, an estimate,
        infinite where a value overflows in these steps; ``overflows``.
    """
    h, n = layers.histograms, len(layers)
    place = {str(name): i for i, name in enumerate(every_step.names)}
    rows = [place[str(name)] for name in layers.names]
    columns: dict[str, list[np.ndarray]] = {"lost_share": [], "rounding_error": [], "overflows": []}
    for exponent in SCALES:
        columns["lost_share"].append(share(h.lost_to_zero(fmt, exponent).value, h.nonzero))
        columns["rounding_error"].append(rounding_error(h, fmt, exponent))
        over = every_step.histograms.overflow(fmt, exponent).lower[rows]
        columns["overflows"].append(over > 0)
    sums = lost_by_scale(layers, fmt, SCALES[0])[:, : len(SCALES)]
    frame = pd.DataFrame(
        {
            "layer": np.repeat(layers.names.astype(object), len(SCALES)),
            "scale_exponent": np.tile(np.array(SCALES), n),
            "sum_share": sums.reshape(-1),
        }
    )
    for name, values in columns.items():
        frame[name] = np.stack(values, axis=1).reshape(-1) if n else []
    return frame


@dataclass(frozen=True)
class ScaleSummary:
    """A ``scale_frame`` in four figures.

    Attributes:
        lost_share: Of all non-zero values.
        worst_sum_share: Of Σ|x|, in the layer that loses most.
        worst_layer: That layer.
        overflow_layers: How many layers overflow.
    """

    lost_share: float
    worst_sum_share: float
    worst_layer: str
    overflow_layers: int


def summary(frame: pd.DataFrame) -> ScaleSummary:
    """What a format and a scale do, over all layers of a ``scale_frame``."""
    if frame.empty:
        return ScaleSummary(0.0, 0.0, "", 0)
    worst = int(frame["sum_share"].to_numpy().argmax())
    return ScaleSummary(
        lost_share=float(share(frame["lost"].sum(), frame["nonzero"].sum())),
        worst_sum_share=float(frame["sum_share"].iloc[worst]),
        worst_layer=str(frame["layer"].iloc[worst]),
        overflow_layers=int((frame["overflow"] > 0).sum()),
    )
