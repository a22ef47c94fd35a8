"""Layers × powers of two, a format's window, and a loss scale that moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.analysis.figures.figure import at_scale
from mpdiag.display.wording import (
    KIND_NAMES,
    in_markdown,
    percent,
    power,
    scale_text,
    sentence,
    spoken_layer,
)
from mpdiag.numerics.formats import FORMATS, FP16, TARGETS
from mpdiag.reports.views.gradients import pictures
from mpdiag.reports.views.gradients.frame import (
    SCALES,
    every_scale_frame,
    layers_named,
    recommended_interval,
    scale_frame,
    summary,
)

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat

chosen = run_folder.current()
widgets.heading("Gradients", chosen)
analysis = run_cache.analysis(chosen)
plan = analysis.plan.loss_scale
run = str(chosen.folder)


@st.fragment
def view() -> None:
    """Everything that the slider moves."""
    first, second, third, fourth = st.columns([1.3, 1.9, 0.9, 1.3], vertical_alignment="bottom")
    kind = first.selectbox(
        "Tensors",
        [k for k in KIND_NAMES if k in set(analysis.layers.kinds)],
        format_func=lambda k: KIND_NAMES[k],
        key="kind",
        bind="query-params",
    )
    formats = [fmt.name for fmt in TARGETS]
    name = second.segmented_control(
        "Format",
        formats,
        default=FP16.name,
        required=True,
        format_func=lambda f: FORMATS[f].label.replace("FP8 ", ""),
        key="format",
        bind="query-params",
    )
    log = third.toggle("Log counts", value=True, key="log", bind="query-params")
    text = fourth.text_input(
        "Find layers", key="find", placeholder="part of a name", bind="query-params"
    )
    fmt = FORMATS[name or FP16.name]
    exponent = st.slider(
        "Loss scale",
        SCALES[0],
        SCALES[-1],
        max(SCALES[0], int(np.log2(plan.recommended))),
        format="2^%d",
        key="scale",
        bind="query-params",
        help=f"Recommended: {scale_text(plan.recommended)}. It multiplies gradients; move it to see its "
        "effect on every layer.",
    )
    window = _window(kind)
    whole = layers_named(run_cache.layers(chosen, kind), text or "")
    layers = whole
    if window is not None:
        layers = layers_named(run_cache.late_layers(chosen), text or "")
    if not len(layers):
        st.info(in_markdown(f"No layer has “{text}” in its name."))
        return
    _numbers(layers, whole, fmt, exponent, window)
    key = ("every scale", kind, fmt.name, text or "", window)
    frame = run_cache.once(chosen, *key, make=lambda: every_scale_frame(layers, fmt, whole))
    widgets.show(
        pictures.every_scale(
            *(run, layers, kind, fmt, exponent, plan), frame=frame, window=window, whole=whole
        )
    )
    everything, single = st.tabs(["All layers", "One layer"], key="tab", bind="query-params")
    with everything:
        widgets.show(pictures.heat_map(run, layers, kind, fmt, exponent, log=log, window=window))
        widgets.show(pictures.consequences(run, layers, kind, fmt, exponent, window=window))
        widgets.table(scale_frame(layers, fmt, exponent))
    with single:
        names = [str(n) for n in layers.names]
        layer = widgets.choose_layer(names)
        widgets.show(
            pictures.one_histogram(
                *(run, layers, kind, fmt, exponent), layer=layer, log=log, window=window
            )
        )
        if layer is not None:
            records = analysis.run.records
            widgets.show(pictures.over_time(run, records, kind, layer, fmt, exponent, log=log))


def _window(kind: str) -> Window | None:
    """The steps to show: those that decide the verdict, unless all of them are asked for."""
    late = analysis.loss_scale.window
    if kind != "activation_grad" or late is None:
        return None
    words = {"late": late.words, "all": "over all recorded steps"}
    choice = st.segmented_control(
        "Steps",
        list(words),
        default="late",
        required=True,
        format_func=lambda name: words[name],
        key="steps",
        bind="query-params",
        help="The verdict goes by the part of the training in which most is lost.",
    )
    return None if choice == "all" else late


def _numbers(
    layers: Layers, whole: Layers, fmt: FloatFormat, exponent: int, window: Window | None
) -> None:
    shown, all_steps = (summary(scale_frame(part, fmt, exponent)) for part in (layers, whole))
    low, high = recommended_interval(plan)
    inside = low <= exponent <= high
    cells = st.columns(4)
    cells[0].metric("Values lost to 0", percent(shown.lost_share), border=True)
    cells[1].metric("Σ|x| lost, worst layer", percent(shown.worst_sum_share), border=True)
    overflow = str(all_steps.overflow_layers) if all_steps.overflow_layers else "none"
    cells[2].metric("Layers that overflow", overflow, border=True)
    cells[3].metric("Selected loss scale", power(exponent), border=True)
    worst = spoken_layer(shown.worst_layer)
    words = "inside" if inside else "outside"
    upper = scale_text(plan.upper)
    when = "over all recorded steps" if window is None else window.words
    lost = (
        f"{when}, {at_scale(2.0**exponent)}, {fmt.label} loses {percent(shown.worst_sum_share)} of the "
        f"sum of {worst}, the most of these layers"
    )
    st.caption(
        in_markdown(
            f"{sentence(lost)} Overflow is counted over all recorded steps. The scale is {words} the "
            f"interval from {scale_text(plan.lower)} to {upper}; {scale_text(plan.recommended)} is "
            "recommended."
        )
    )


view()
