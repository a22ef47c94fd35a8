"""Where values lie among the powers of two, and what a format and a loss scale do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.figures.figure import at_scale
from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    layer_name,
    percent,
    scale_text,
    sentence,
    spoken_layer,
)
from mpdiag.numerics.formats import FP16
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.views.gradients import figure, receipt, scales
from mpdiag.reports.views.gradients import frame as tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.plan import LossScalePlan
    from mpdiag.reports.contents import RunContents
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind


def heat_map(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    *,
    log: bool = True,
    window: Window | None = None,
    height: int | None = None,
    clickable: bool = False,
) -> Picture:
    """Layers × exponents with the format's range.

    Args:
        run: The run folder.
        layers: Histograms of the steps that are drawn.
        kind: Their kind.
        fmt: The format.
        exponent: log2 of the selected scale.
        log: Shade by the logarithm of the share.
        window: The steps; None for all that were recorded.
        height: In pixels; by default as many as the rows ask for.
        clickable: Whether a click on a row selects its layer.
    """
    frame = tables.exponent_frame(layers)
    names = [str(name) for name in layers.names]
    return Picture(
        "heat-map",
        f"Where the {KIND_NAMES[kind]} lie, layer by layer",
        heat_map_words(layers, fmt, exponent, window),
        figure.heat_map(
            *(frame, names, fmt, exponent), log=log, height=height, clickable=clickable
        ),
        frame,
        receipt.exponents(run, kind, window),
    )


def heat_map_words(layers: Layers, fmt: FloatFormat, exponent: int, window: Window | None) -> str:
    """How to read the heat map, with what it shows."""
    h = layers.histograms.merged()
    nonzero = max(1, int(h.nonzero))
    lost = int(h.lost_to_zero(fmt, exponent).value)
    fewer = int(h.below_normal(fmt, exponent).value) - lost
    text = (
        f"Each cell is a power of two of one layer {_when(window)}; the stronger its colour, the more "
        f"values. {sentence(_at(exponent))[:-1]} {fmt.label} makes {percent(lost / nonzero)} of the "
        "non-zero values 0"
    )
    if fewer > 0:
        text += (
            f" and keeps fewer than {fmt.mantissa_bits + 1} significant bits of up to "
            f"{percent(fewer / nonzero)}, which lose bits"
        )
    return f"{text}. A larger scale moves {fmt.label}'s range left."


def facts(
    layers: Layers,
    whole: Layers,
    fmt: FloatFormat,
    exponent: int,
    *,
    window: Window | None = None,
    scale: LossScalePlan | None = None,
) -> str:
    """What a format and a scale do beyond what ``heat_map_words`` says, in one line.

    Args:
        layers: Histograms of the steps whose losses count.
        whole: Those of all recorded steps, in any of which a layer may overflow.
        fmt: The format.
        exponent: log2 of the selected scale.
        window: The steps of the losses; None for all that were recorded.
        scale: The plan's, if it speaks of these tensors.
    """
    shown = tables.summary(tables.scale_frame(layers, fmt, exponent))
    over = tables.summary(tables.scale_frame(whole, fmt, exponent)).overflow_layers
    text = f"{_at(exponent)}, {_when(window)}, in {fmt.label}: "
    if shown.worst_sum_share > 0:
        lost = f"{percent(shown.worst_sum_share)} of its sum"
        text += f"{spoken_layer(shown.worst_layer)} loses most, {lost}; "
    text += f"{counted(over, 'layer') if over else 'no layer'} "
    text += f"{'overflow' if over > 1 else 'overflows'} in any recorded step"
    if scale is not None:
        low, high = tables.recommended_interval(scale)
        inside = "inside" if low <= exponent <= high else "outside"
        text += (
            f". The scale is {inside} the plan's interval, {scale_text(scale.lower)} to "
            f"{scale_text(scale.upper)}; the plan takes {scale_text(scale.recommended)}"
        )
    return sentence(text)


def layer_scales(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    scale: LossScalePlan | None,
    *,
    frame: pd.DataFrame | None = None,
    window: Window | None = None,
    whole: Layers | None = None,
    height: int | None = None,
    labels: bool = True,
) -> Picture:
    """Each layer at every loss scale.

    Args:
        run: The run folder.
        layers: Histograms of the steps whose losses are drawn.
        kind: Their kind.
        fmt: The format.
        exponent: log2 of the selected scale.
        scale: The plan's; None where it speaks of other tensors or of another format.
        frame: The table, if it is known already.
        window: The steps; None for all that were recorded.
        whole: The layers over all recorded steps, in any of which they may overflow.
        height: In pixels; by default as many as the rows ask for.
        labels: Whether rows are labelled.
    """
    if frame is None:
        frame = scales.layer_scales_frame(layers, fmt, whole)
    names = [str(name) for name in layers.names]
    caption = f"What each layer loses {_when(window)}."
    if scale is not None and len(frame):
        caption = scales.scales_words(frame, fmt, exponent, scale, _when(window))
    return Picture(
        "layer-scales",
        "Loss by scale",
        caption,
        scales.layer_scales(frame, names, exponent, scale, height=height, names=labels),
        frame,
        receipt.layer_scales(run, kind, fmt, window),
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
    window: Window | None = None,
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
        f"Counts per power of two {_when(window)}, coloured by what {fmt.label} makes of them "
        f"{_at(exponent)}; values that are exactly 0 are drawn apart at the left.",
        figure.histogram(frame, zeros, fmt, exponent, log=log),
        frame,
        receipt.totals(run, kind, layer, window),
    )


def consequences(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    *,
    window: Window | None = None,
) -> Picture:
    """What each layer loses at a loss scale, in some steps."""
    frame = tables.scale_frame(layers, fmt, exponent)
    return Picture(
        "consequences",
        f"What {fmt.label} loses {_at(exponent)}",
        f"{sentence(_when(window))} {_listed(frame)} Σ|x| is the share of the layer's sum that is lost, "
        "an estimate; the share of values is exact.",
        figure.consequences(frame),
        frame,
        receipt.losses_at_scale(run, kind, fmt, exponent, window),
    )


def _listed(frame: pd.DataFrame) -> str:
    """Which of the layers are drawn."""
    if len(frame) <= figure.MOST:
        return f"{counted(len(frame), 'layer')}, the largest loss first."
    return f"The {figure.MOST} layers of {len(frame):,} with the largest loss."


def every_scale(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    scale: LossScalePlan,
    *,
    frame: pd.DataFrame | None = None,
    window: Window | None = None,
    whole: Layers | None = None,
) -> Picture:
    """What is lost at every loss scale.

    Args:
        run: The run folder.
        layers: Histograms of the steps whose losses are drawn.
        kind: Their kind.
        fmt: The format.
        exponent: log2 of the selected scale.
        scale: The plan's.
        frame: The table, if it is known already.
        window: The steps; None for all that were recorded.
        whole: The layers over all recorded steps, in any of which they may overflow.
    """
    if frame is None:
        frame = tables.every_scale_frame(layers, fmt, whole)
    recommended = int(np.log2(scale.recommended))
    solid = f"Solid line: the selected scale, {scale_text(2.0**exponent)}"
    lines = (
        f"{solid}, which is the recommended one"  # and lies on its line
        if exponent == recommended
        else f"{solid}; dashed: the recommended one, {scale_text(scale.recommended)}"
    )
    return Picture(
        "every-scale",
        "Every loss scale at once",
        f"Losses {_when(window)}; crosses: a layer overflows in a recorded step. {lines}; shaded: the "
        "interval that is sufficient in each late part of the training and admissible in every "
        "recorded step.",
        figure.every_scale(frame, exponent, tables.recommended_interval(scale), recommended),
        frame,
        receipt.every_scale(run, kind, fmt, window),
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
        f"Each column is a recorded step; between the lines lies {fmt.label}'s range {_at(exponent)}.",
        figure.over_time(frame, fmt, exponent, log=log),
        frame,
        receipt.over_time(run, kind, layer),
    )


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: where values lie, and what is lost where it decides the scale."""
    analysis, run = contents.analysis, str(contents.folder)
    plan = analysis.plan.loss_scale
    exponent = int(np.log2(plan.recommended))
    kind: Kind = "activation_grad"
    layers = tables.in_model_order(analysis.layers.of_kind(kind), contents.modules)
    if len(layers):
        yield heat_map(run, layers, kind, FP16, exponent)
        window = analysis.loss_scale.window
        late = tables.in_model_order(analysis.loss_scale.late, contents.modules)
        yield every_scale(run, late, kind, FP16, exponent, plan, window=window, whole=layers)
        yield consequences(run, late, kind, FP16, 0, window=window)


def _when(window: Window | None) -> str:
    return "over all recorded steps" if window is None else window.words


def _at(exponent: int) -> str:
    return at_scale(2.0**exponent)


VIEW = View("gradients", "Gradients", "equalizer", reported)
