"""Where values lie among the powers of two, and what a format and a loss scale do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.display.wording import KIND_NAMES, layer_name
from mpdiag.numerics.formats import FP16
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.views.gradients import figure, receipt
from mpdiag.reports.views.gradients import frame as tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from mpdiag.analysis.layers import Layers
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.plan import LossScalePlan
    from mpdiag.reports.contents import RunContents
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind


def heat_map(
    run: str, layers: Layers, kind: Kind, fmt: FloatFormat, exponent: int, *, log: bool = True
) -> Picture:
    """Layers × exponents with the format's window."""
    frame = tables.exponent_frame(layers)
    names = [str(name) for name in layers.names]
    return Picture(
        "heat-map",
        f"Where the {KIND_NAMES[kind]} lie, layer by layer",
        f"Each cell is a power of two of one layer, coloured by what {fmt.label} makes of it at this "
        "loss scale; the stronger the colour, the more values. A larger scale moves the window left.",
        figure.heat_map(frame, names, fmt, exponent, log=log),
        frame,
        receipt.exponents(run, kind),
    )


def one_histogram(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    *,
    layer: str | None = None,
    log: bool = True,
) -> Picture:
    """One layer's histogram, or all layers' together, each bar by its fate."""
    if layer is not None:
        layers = tables.one_layer(layers, layer)
    frame = tables.total_frame(layers)
    zeros = int(layers.histograms.zeros.sum())
    whose = "all layers together" if layer is None else layer_name(layer)
    return Picture(
        "histogram",
        f"{KIND_NAMES[kind].capitalize()} of {whose}",
        "Counts per power of two; values that are exactly 0 are drawn apart at the left.",
        figure.histogram(frame, zeros, fmt, exponent, log=log),
        frame,
        receipt.totals(run, kind, layer),
    )


def consequences(run: str, layers: Layers, kind: Kind, fmt: FloatFormat, exponent: int) -> Picture:
    """What each layer loses at a loss scale."""
    frame = tables.scale_frame(layers, fmt, exponent)
    return Picture(
        "consequences",
        f"What {fmt.label} loses at this loss scale",
        "The layers with the largest loss. Σ|x| is the share of the gradient's sum that is lost, "
        "an estimate within a few percent; the share of values is exact.",
        figure.consequences(frame),
        frame,
        receipt.losses_at_scale(run, kind, fmt, exponent),
    )


def every_scale(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    scale: LossScalePlan,
    *,
    frame: pd.DataFrame | None = None,
) -> Picture:
    """What is lost at every loss scale; ``frame`` is its table, if it is known already."""
    if frame is None:
        frame = tables.every_scale_frame(layers, fmt)
    recommended = int(np.log2(scale.recommended))
    return Picture(
        "every-scale",
        "Every loss scale at once",
        "Red: the selected scale; dashed: the recommended one; shaded: sufficient and admissible.",
        figure.every_scale(frame, exponent, tables.recommended_interval(scale), recommended),
        frame,
        receipt.every_scale(run, kind, fmt),
    )


def over_time(
    run: str,
    records: Records,
    kind: Kind,
    layer: str,
    fmt: FloatFormat,
    exponent: int,
    *,
    log: bool = True,
) -> Picture:
    """One layer over the recorded steps."""
    frame = tables.time_frame(records, kind, layer)
    return Picture(
        "over-time",
        f"{layer_name(layer)} over time",
        f"Each column is a recorded step; between the lines lies {fmt.label}'s window.",
        figure.over_time(frame, fmt, exponent, log=log),
        frame,
        receipt.over_time(run, kind, layer),
    )


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: activation gradients at the recommended scale."""
    analysis, run = contents.analysis, str(contents.folder)
    plan = analysis.plan.loss_scale
    exponent = int(np.log2(plan.recommended))
    kind: Kind = "activation_grad"
    layers = tables.in_model_order(analysis.layers.of_kind(kind), contents.modules)
    if len(layers):
        yield heat_map(run, layers, kind, FP16, exponent)
        yield every_scale(run, layers, kind, FP16, exponent, plan)
        yield consequences(run, layers, kind, FP16, 0)


VIEW = View("gradients", "Gradients", "equalizer", reported)
