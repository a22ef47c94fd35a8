"""Layers × powers of two, a format's window, and a loss scale that moves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import layer_links
import numpy as np
import run_cache
import run_folder
import streamlit as st
import widgets
from figure_card import figure_card

from mpdiag.display.wording import (
    KIND_NAMES,
    in_markdown,
    layer_name,
    magnitude,
    percent,
    scale_text,
)
from mpdiag.numerics.formats import FORMATS, FP16, TARGETS
from mpdiag.reports.views.gradients import pictures
from mpdiag.reports.views.gradients.frame import (
    SCALES,
    every_scale_frame,
    layers_named,
    scale_frame,
)
from mpdiag.reports.views.gradients.scales import layer_scales_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.schema import Kind

chosen = run_folder.current()
widgets.heading("Gradients", chosen)
analysis = run_cache.analysis(chosen)
plan = analysis.plan.loss_scale
run = str(chosen.folder)
SCALED = ("activation_grad", "weight_grad")  # what a loss scale multiplies
HEIGHT = 460  # pixels of the heat map: with the slider above it, a laptop's window shows both


@st.fragment
def view() -> None:
    """Everything that the slider moves."""
    kind, fmt, text, log = _settings()
    exponent, window = _scale(kind)
    whole = layers_named(run_cache.layers(chosen, kind), text)
    layers = whole
    if window is not None:
        layers = layers_named(run_cache.late_layers(chosen), text)
    if not len(layers):
        st.info(in_markdown(f"No layer has “{text}” in its name."))
        return
    left, right = st.columns([1.75, 1]) if kind in SCALED else (st.container(), None)
    below, table = st.columns(2, gap="medium"), st.container()
    shown = Shown(kind, fmt, exponent, window, text, layers, whole)
    if right is not None:
        with right:
            _layer_scales(shown)
        _below(below, shown)
    with left:
        points = _heat_map(shown, log=log)
    if points:
        layer_links.open_layer(str(points[0]["customdata"]), kind, fmt, exponent)
    if right is not None:
        with table:
            _losses_table(scale_frame(layers, fmt, exponent))


@dataclass(frozen=True)
class Shown:
    """What the controls ask for, and its layers in the steps shown and in all steps."""

    kind: Kind
    fmt: FloatFormat
    exponent: int
    window: Window | None
    text: str
    layers: Layers
    whole: Layers

    @property
    def one(self) -> tuple[str, Layers, Kind, FloatFormat, int]:
        """What each picture of one scale begins with."""
        return run, self.layers, self.kind, self.fmt, self.exponent

    @property
    def planned(self) -> Any:
        """The plan's scale, where it speaks of these tensors."""
        return plan if self.kind in SCALED and self.fmt == analysis.target else None

    def once(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """A table that no loss scale changes."""
        key = (name, self.kind, self.fmt.name, self.text, self.window)
        frame: pd.DataFrame = run_cache.once(chosen, *key, make=make)
        return frame


def _heat_map(shown: Shown, *, log: bool) -> list[dict[str, Any]]:
    """The heat map and a line of its figures; the points that are clicked.

    It is sent after the others beside it: drawn by Plotly from nothing, it holds the browser up.
    """
    height: Any = {"height": HEIGHT, "clickable": True}
    heat = pictures.heat_map(*shown.one, log=log, window=shown.window, **height)
    points: list[dict[str, Any]] = figure_card(heat, selectable=True)
    line = pictures.facts(
        *(shown.layers, shown.whole, shown.fmt, shown.exponent),
        window=shown.window,
        scale=shown.planned,
    )
    st.caption(in_markdown(line))
    return points


def _layer_scales(shown: Shown) -> None:
    """What each layer loses at every scale, level with the heat map's rows."""
    layers, whole = shown.layers, shown.whole
    frame = shown.once("layer scales", lambda: layer_scales_frame(layers, shown.fmt, whole))
    size: Any = {"height": HEIGHT, "labels": False}
    widgets.show(
        pictures.layer_scales(
            *(*shown.one, shown.planned), frame=frame, window=shown.window, whole=whole, **size
        )
    )


def _settings() -> tuple[Kind, FloatFormat, str, bool]:
    """The row of controls."""
    first, second, third, fourth = st.columns([1.3, 1.9, 1.3, 0.9], vertical_alignment="bottom")
    kind = first.selectbox(
        "Tensors",
        [k for k in KIND_NAMES if k in set(analysis.layers.kinds)],
        format_func=lambda k: KIND_NAMES[k],
        key="kind",
        bind="query-params",
    )
    name = second.segmented_control(
        "Format",
        [fmt.name for fmt in TARGETS],
        default=FP16.name,
        required=True,
        format_func=lambda f: FORMATS[f].label.replace("FP8 ", ""),
        key="format",
        bind="query-params",
    )
    text = third.text_input(
        "Find layers", key="find", placeholder="part of a name", bind="query-params"
    )
    log = fourth.toggle("Log counts", value=True, key="log", bind="query-params")
    return kind, FORMATS[name or FP16.name], text or "", log


def _scale(kind: Kind) -> tuple[int, Window | None]:
    """The slider, and the steps to show: those that decide the verdict, unless all are asked for."""
    left, right = st.columns([1.6, 1], vertical_alignment="bottom", gap="medium")
    scaled = kind in SCALED
    exponent = left.slider(
        "Loss scale",
        SCALES[0],
        SCALES[-1],
        max(SCALES[0], int(np.log2(plan.recommended))),
        format="2^%d",
        key="scale",
        bind="query-params",
        disabled=not scaled,
        help=f"The plan's: {scale_text(plan.recommended)}. It multiplies gradients; move it to see its "
        "effect on every layer."
        if scaled
        else f"A loss scale multiplies gradients, and no {KIND_NAMES[kind]}: these are shown without.",
    )
    late = analysis.loss_scale.window
    if kind != "activation_grad" or late is None:
        return (exponent if scaled else 0), None
    words = {"late": late.words, "all": "over all recorded steps"}
    choice = right.selectbox(
        "Steps",
        list(words),
        format_func=lambda name: words[name],
        key="steps",
        bind="query-params",
        help="The verdict goes by the part of the training in which most is lost.",
    )
    return exponent, None if choice == "all" else late


def _below(places: Sequence[Any], shown: Shown) -> None:
    """Details under the heat map."""
    layers, whole, window = shown.layers, shown.whole, shown.window
    frame = shown.once("every scale", lambda: every_scale_frame(layers, shown.fmt, whole))
    with places[0]:
        figure_card(pictures.consequences(*shown.one, window=window), bars=True)
    with places[1]:
        widgets.show(
            pictures.every_scale(*shown.one, plan, frame=frame, window=window, whole=whole)
        )


def _losses_table(frame: pd.DataFrame) -> None:
    """The figures of every layer, in words and numbers as people write them."""
    columns = {
        "layer": "layer",
        "nonzero": "values",
        "lost": "become 0",
        "lost_share": "share of values",
        "sum_share": "share of Σ|x|",
        "overflow": "overflow, at least",
        "overflow_most": "at most",
        "absmax": "largest |x|",
    }
    shown = frame[list(columns)].rename(columns=columns)
    shown["layer"] = shown["layer"].map(layer_name)
    counts = dict.fromkeys(("values", "become 0", "overflow, at least", "at most"), "{:,}")
    shares = dict.fromkeys(("share of values", "share of Σ|x|"), percent)
    st.dataframe(
        shown.style.format({**counts, **shares, "largest |x|": magnitude}), hide_index=True
    )


view()
