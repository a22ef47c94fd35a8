"""Layers × powers of two, a format's window, and a loss scale that moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    planned = plan if kind in SCALED and fmt == analysis.target else None
    left, right = st.columns([1.75, 1]) if kind in SCALED else (st.container(), None)
    with left:
        heat = pictures.heat_map(
            *(run, layers, kind, fmt, exponent),
            log=log,
            window=window,
            height=HEIGHT,
            clickable=True,
        )
        points = figure_card(heat, selectable=True)
        line = pictures.facts(layers, whole, fmt, exponent, window=window, scale=planned)
        st.caption(in_markdown(line))
    if points:
        layer_links.open_layer(str(points[0]["customdata"]), kind, fmt, exponent)
    if right is None:
        return
    key = ("layer scales", kind, fmt.name, text, window)
    frame = run_cache.once(chosen, *key, make=lambda: layer_scales_frame(layers, fmt, whole))
    with right:
        widgets.show(
            pictures.layer_scales(
                *(run, layers, kind, fmt, exponent, planned),
                frame=frame,
                window=window,
                whole=whole,
                height=HEIGHT,
                labels=False,
            )
        )
    _below(layers, whole, kind, fmt, exponent, text, window)


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


def _below(
    layers: Layers,
    whole: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    text: str,
    window: Window | None,
) -> None:
    """Details under the heat map."""
    key = ("every scale", kind, fmt.name, text, window)
    frame = run_cache.once(chosen, *key, make=lambda: every_scale_frame(layers, fmt, whole))
    left, right = st.columns(2, gap="medium")
    with left:
        lost = pictures.consequences(run, layers, kind, fmt, exponent, window=window)
        figure_card(lost, bars=True)
    with right:
        widgets.show(
            pictures.every_scale(
                *(run, layers, kind, fmt, exponent, plan), frame=frame, window=window, whole=whole
            )
        )
    _losses_table(scale_frame(layers, fmt, exponent))


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
