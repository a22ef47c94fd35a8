"""Layers × powers of two, a format's window, and a loss scale that moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import layer_course
import layer_links
import numpy as np
import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import (
    KIND_NAMES,
    in_markdown,
    layer_name,
    magnitude,
    percent,
    scale_text,
)
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views.gradients.frame import SCALES, scale_frame
from mpdiag.reports.views.gradients.pictures import SCALED, Gradients

if TYPE_CHECKING:
    import pandas as pd

    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.schema import Kind

chosen = run_folder.current()
widgets.heading("Gradients", chosen)
analysis = run_cache.analysis(chosen)
plan = analysis.plan.loss_scale
run = str(chosen.folder)
HEIGHT = 460  # pixels of the heat map: with the slider above it, a laptop's window shows both


@st.fragment
def view() -> None:
    """Everything that the slider moves."""
    kind, fmt, text, log = _settings()
    exponent, window = _scale(kind)
    shown = run_cache.once(
        *(chosen, "gradients", kind, fmt.name, text, window),
        make=lambda: gradients(kind, fmt, text, window),
    )
    if not len(shown.layers):
        st.info(in_markdown(f"No layer name contains “{text}”."))
        return
    left, right = st.columns([1.75, 1]) if kind in SCALED else (st.container(), None)
    table = st.container()
    if right is not None:
        with right:
            widgets.show(shown.layer_scales(exponent, height=HEIGHT))
    with left:  # sent after the others: drawn by Plotly from nothing, it holds the browser up
        heat = shown.heat_map(exponent, log=log, height=HEIGHT, clickable=True)
        points = widgets.show(heat, selectable=True)
        st.caption(in_markdown(shown.facts(exponent)))
    if points:
        layer_links.open_layer(str(points[0]["customdata"]), kind, fmt, exponent)
    if right is not None:
        with table:
            _losses_table(scale_frame(shown.layers, fmt, exponent))


def gradients(kind: Kind, fmt: FloatFormat, text: str, window: Window | None) -> Gradients:
    """The tensors that the controls ask for; their tables are made once for all loss scales."""
    every_step = layer_course.layers_named(run_cache.layers(chosen, kind), text)
    late = (
        None if window is None else layer_course.layers_named(run_cache.late_layers(chosen), text)
    )
    planned = plan if kind in SCALED and fmt == analysis.target else None
    layers = every_step if late is None else late
    return Gradients(run, kind, layers, fmt, window, every_step, planned)


def _settings() -> tuple[Kind, FloatFormat, str, bool]:
    """The row of controls."""
    first, second, third, fourth = st.columns([1.3, 1.9, 1.3, 0.9], vertical_alignment="bottom")
    kind = widgets.choose_kind(first, [k for k in KIND_NAMES if k in set(analysis.layers.kinds)])
    fmt = widgets.choose_format(second, FP16)
    text = third.text_input(
        "Find layers", key="find", placeholder="part of a name", bind="query-params"
    )
    log = fourth.toggle("Log counts", value=True, key="log", bind="query-params")
    return kind, fmt, text or "", log


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
        help=f"The plan's loss scale: {scale_text(plan.recommended)}. Move it to see its effect on "
        "every layer."
        if scaled
        else f"A loss scale multiplies gradients only, so it does not change {KIND_NAMES[kind]}.",
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
        help="The verdict uses the part of the training in which most is lost.",
    )
    return exponent, None if choice == "all" else late


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
