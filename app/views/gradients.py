"""Layers × powers of two, a format's window, and a loss scale that moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kit
import numpy as np
import streamlit as st

from mpdiag.numerics.formats import FORMATS, FP16, TARGETS
from mpdiag.reports import pictures
from mpdiag.reports.frames.gradients import SCALES, every_scale_frame, scale_frame, summary
from mpdiag.reports.words import in_markdown, layer_name, percent, power

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers
    from mpdiag.numerics.formats import FloatFormat

chosen = kit.current()
kit.heading("Gradients", chosen)
analysis = kit.analysis(chosen)
plan = analysis.plan.loss_scale
run = str(chosen.folder)


@st.fragment
def view() -> None:
    """Everything that the slider moves."""
    first, second, third, fourth = st.columns([1.3, 1.9, 0.9, 1.3], vertical_alignment="bottom")
    kind = first.selectbox(
        "Tensors",
        [k for k in pictures.KIND_WORDS if k in set(analysis.layers.kinds)],
        format_func=lambda k: pictures.KIND_WORDS[k],
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
        int(np.log2(plan.recommended)),
        format="2^%d",
        key="scale",
        bind="query-params",
        help=f"Recommended: {plan.recommended:g}. It multiplies gradients; move it to see what "
        "becomes of every layer.",
    )
    layers = pictures.found(kit.layers(chosen, kind), text or "")
    if not len(layers):
        st.info(in_markdown(f"No layer here has “{text}” in its name."))
        return
    _numbers(layers, fmt, exponent)
    key = ("every scale", kind, fmt.name, text or "")
    frame = kit.once(chosen, *key, make=lambda: every_scale_frame(layers, fmt))
    kit.show(pictures.every_scale(run, layers, kind, fmt, exponent, plan, frame=frame))
    everything, single = st.tabs(["All layers", "One layer"], key="tab", bind="query-params")
    with everything:
        kit.show(pictures.heat_map(run, layers, kind, fmt, exponent, log=log))
        kit.show(pictures.consequences(run, layers, kind, fmt, exponent))
        kit.table(scale_frame(layers, fmt, exponent))
    with single:
        names = [str(n) for n in layers.names]
        layer = kit.choose_layer(names)
        kit.show(pictures.one_histogram(run, layers, kind, fmt, exponent, layer=layer, log=log))
        if layer is not None:
            records = analysis.run.records
            kit.show(pictures.over_time(run, records, kind, layer, fmt, exponent, log=log))


def _numbers(layers: Layers, fmt: FloatFormat, exponent: int) -> None:
    whole = summary(scale_frame(layers, fmt, exponent))
    low, high = pictures.interval_of(plan)
    inside = low <= exponent <= high
    cells = st.columns(4)
    cells[0].metric("Values lost to 0", percent(whole.lost_share), border=True)
    cells[1].metric("Σ|x| lost, worst layer", percent(whole.worst_sum_share), border=True)
    overflow = str(whole.overflow_layers) if whole.overflow_layers else "none"
    cells[2].metric("Layers that overflow", overflow, border=True)
    cells[3].metric("This loss scale", power(exponent), border=True)
    worst = layer_name(whole.worst_layer)
    words = "inside" if inside else "outside"
    upper = "no limit" if plan.upper is None else f"{plan.upper:g}"
    st.caption(
        in_markdown(
            f"This scale is {words} the interval from {plan.lower:g} to {upper} that is "
            f"sufficient and admissible; {plan.recommended:g} is recommended. "
            f"{worst} loses the largest part of its sum."
        )
    )


view()
