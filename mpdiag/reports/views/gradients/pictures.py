"""Where values lie among the powers of two, and what a format and a loss scale do to them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.analysis.scaling.necessity import MATTERS
from mpdiag.analysis.scaling.windows import Window
from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    layer_name,
    percent,
    scale_text,
    sentence,
    shortened,
    spoken_layer,
)
from mpdiag.numerics.formats import FP16, FP32, FloatFormat
from mpdiag.plan import LossScalePlan
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import exponent_axis
from mpdiag.reports.receipts import Rows
from mpdiag.reports.views.gradients import figure, scales
from mpdiag.reports.views.gradients import frame as tables
from mpdiag.runs.schema import Kind

SCALED = ("activation_grad", "weight_grad")
"""What a loss scale multiplies."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """Tensors of one kind, layer by layer, in a format: its tables and pictures at any loss scale.

    Attributes:
        run: The run folder.
        kind: Of which tensors.
        layers: Their histograms in the steps shown.
        fmt: The format.
        window: The steps; None for all that were recorded.
        every_step: The layers over all recorded steps, in any of which one may overflow; None for
            ``layers``.
        plan: The plan's loss scale, if it speaks of these tensors in this format.
    """

    run: str
    kind: Kind
    layers: Layers
    fmt: FloatFormat = FP16
    window: Window | None = None
    every_step: Layers | None = None
    plan: LossScalePlan | None = None

    @cached_property
    def names(self) -> list[str]:
        """The rows of the figures, top first."""
        return [str(name) for name in self.layers.names]

    @property
    def rows(self) -> Rows:
        """What their receipts read."""
        return Rows(self.run, self.kind, window=self.window)

    @property
    def when(self) -> str:
        """The steps, as a phrase."""
        return "over all recorded steps" if self.window is None else self.window.words

    @property
    def in_every_step(self) -> Layers:
        """The layers over all recorded steps."""
        return self.layers if self.every_step is None else self.every_step

    @cached_property
    def exponents(self) -> pd.DataFrame:
        """Where the values of each layer lie."""
        return tables.exponent_frame(self.layers)

    @cached_property
    def by_layer_and_scale(self) -> pd.DataFrame:
        """What each layer loses at every loss scale."""
        return tables.layer_scales_frame(self.layers, self.fmt, self.in_every_step)

    def heat_map(
        self, exponent: int, *, log: bool = True, height: int | None = None, clickable: bool = False
    ) -> Picture:
        """Layers × exponents with the format's range.

        Args:
            exponent: log2 of the loss scale.
            log: Shade by the logarithm of the share.
            height: In pixels; by default as many as the rows ask for.
            clickable: Whether a click on a row selects its layer.
        """
        window = figure.window(self.fmt, exponent)
        return Picture(
            "heat-map",
            f"Where the {KIND_NAMES[self.kind]} lie, layer by layer",
            self.heat_map_words(exponent),
            figure.heat_map(
                self.exponents,
                self.names,
                window,
                log=log,
                height=height,
                clickable=clickable,
                words=self.rounding_words(exponent),
            ),
            self.exponents,
            self.rows.bins("name", "exponent"),
        )

    def heat_map_words(self, exponent: int) -> str:
        """How to read the heat map, with what it shows."""
        h, label = self.layers.histograms.merged(), self.fmt.label
        nonzero = max(1, int(h.nonzero))
        lost = int(h.lost_to_zero(self.fmt, exponent).value)
        text = (
            f"Each cell is a power of two of one layer {self.when}. The stronger its colour, the more "
            f"values. {sentence(_at(exponent))[:-1]}, {percent(lost / nonzero)} of the non-zero values "
            f"become 0 in {label}. Rounding that moves a layer by more than {100 * MATTERS:g} % is "
            "harmful."
        )
        # BF16 has FP32's range: no scale that is used brings it near.
        moves = self.kind in SCALED and self.fmt.min_exponent > FP32.min_exponent
        return f"{text} A larger scale moves {label}'s range left." if moves else text

    def rounding_words(self, exponent: int) -> str:
        """How far the format's rounding moves a layer at most, as ‖rounded − x‖ / ‖x‖; "" for none."""
        errors = rounding_error(self.layers.histograms, self.fmt, exponent)
        if not errors.size:
            return ""
        worst = int(errors.argmax())
        error, name = float(errors[worst]), shortened(self.names[worst], 20)
        if math.isinf(error):
            return f"{name} overflows {self.fmt.label}."
        if len(self.names) == 1:
            return f"Rounding moves {name} by {percent(error)}."
        if error <= MATTERS:
            return f"Rounding moves no layer by more than {percent(error)}."
        return f"Rounding moves {name} most, by {percent(error)}."

    def facts(self, exponent: int) -> str:
        """What a loss scale does beyond what ``heat_map_words`` says, in one line."""
        shown = tables.summary(tables.scale_frame(self.layers, self.fmt, exponent))
        over = tables.summary(
            tables.scale_frame(self.in_every_step, self.fmt, exponent)
        ).overflow_layers
        text = f"{_at(exponent)}, {self.when}, in {self.fmt.label}: "
        if shown.worst_sum_share > 0:
            lost = f"{percent(shown.worst_sum_share)} of its sum"
            text += f"{spoken_layer(shown.worst_layer)} loses most, {lost}; "
        text += f"{counted(over, 'layer') if over else 'no layer'} "
        text += f"{'overflow' if over > 1 else 'overflows'} in any recorded step"
        scale = self.plan
        if scale is not None:
            low, high = tables.recommended_interval(scale)
            inside = "inside" if low <= exponent <= high else "outside"
            text += (
                f". The scale is {inside} the plan's interval, {scale_text(scale.lower)} to "
                f"{scale_text(scale.upper)}; the plan's scale is {scale_text(scale.recommended)}"
            )
        return sentence(text)

    def layer_scales(self, exponent: int, *, height: int | None = None) -> Picture:
        """Each layer at every loss scale.

        Args:
            exponent: log2 of the selected scale.
            height: In pixels; by default as many as the rows ask for.
        """
        frame, plan = self.by_layer_and_scale, self.plan
        caption = f"What each layer loses {self.when}."
        if plan is not None and len(frame):
            caption = scales.scales_words(frame, self.fmt, exponent, plan, self.when)
        return Picture(
            "layer-scales",
            "Underflow by scale",
            caption,
            scales.layer_scales(frame, self.names, exponent, plan, height=height),
            frame,
            self.rows.every_scale(self.fmt, tables.SCALES),
        )

    def histogram(
        self, exponent: int, *, layer: str | None = None, log: bool = True, words: str = ""
    ) -> Picture:
        """One layer's histogram, or all layers' together, each bar by its fate.

        Args:
            exponent: log2 of the loss scale.
            layer: Its name; None for all together.
            log: Counts on a log scale; else shares of the values, without those that are 0.
            words: A line above the bars.
        """
        layers = self.layers if layer is None else tables.one_layer(self.layers, layer)
        frame = tables.total_frame(layers)
        zeros = int(layers.histograms.zeros.sum()) if log else 0
        whose = "all layers together" if layer is None else layer_name(layer)
        return Picture(
            "histogram",
            f"{KIND_NAMES[self.kind].capitalize()} of {whose}",
            f"Counts per power of two {self.when}. Colours: what becomes of the values in "
            f"{self.fmt.label} {_at(exponent)}. Values that are exactly 0: separate bar at the left.",
            figure.histogram(frame, zeros, figure.window(self.fmt, exponent), log=log, words=words),
            frame,
            replace(self.rows, layer=layer).bins("exponent"),
        )


def share_axis(pictures: Sequence[Picture], title: str | None = figure.VALUES) -> None:
    """Give heat maps the widest axis of any, so that only the format's range moves."""
    ranges = [picture.figure.layout.xaxis.range for picture in pictures]
    if not all(ranges):
        return
    low, high = min(int(r[0]) for r in ranges), max(int(r[1]) for r in ranges)
    for picture in pictures:
        exponent_axis(picture.figure, low, high, title)


def _at(exponent: int) -> str:
    return at_scale(2.0**exponent)


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: where values lie, and what is lost where it decides the scale."""
    analysis, run = contents.analysis, str(contents.folder)
    plan = analysis.plan.loss_scale
    exponent = int(np.log2(plan.recommended))
    layers = tables.in_model_order(analysis.layers.of_kind("activation_grad"), contents.modules)
    if len(layers):
        yield Gradients(run, "activation_grad", layers).heat_map(exponent)
        late = tables.in_model_order(analysis.loss_scale.late, contents.modules)
        window = analysis.loss_scale.window
        deciding = Gradients(run, "activation_grad", late, FP16, window, layers, plan)
        yield deciding.layer_scales(exponent)
