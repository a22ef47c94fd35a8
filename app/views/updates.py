"""Weight updates beside their weights: what 16-bit weights would round away."""

from __future__ import annotations

import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import in_markdown, layer_name, percent, sentence
from mpdiag.reports.views.updates import Updates

LABELS = {
    "swallowed_fp16": "rounded away, FP16",
    "swallowed_bf16": "rounded away, BF16",
    "vanished_fp16": "0 in FP16",
    "fp16_share": "share, FP16",
    "bf16_share": "share, BF16",
    "beyond_2048": "|w| / |Δw| > 2048",
}

chosen = run_folder.current()
widgets.heading("Updates", chosen)
analysis = run_cache.analysis(chosen)
masters = analysis.plan.master_weights
st.markdown(in_markdown(sentence(masters.reason)))
swallowed = analysis.figures.find("updates-swallowed")
if swallowed is not None:
    st.caption(in_markdown(f"All figures on this page: {swallowed.where}."))

shown = run_cache.once(
    chosen, "updates", make=lambda: Updates(str(chosen.folder), analysis.run.records)
)
cells = st.columns(3)
share = swallowed.said if swallowed else percent(masters.swallowed_fraction)
cells[0].metric("Rounded away by FP16 weights", share, border=True)
cells[1].metric("Worst parameter", layer_name(masters.worst_parameter), border=True)
cells[2].metric("FP32 masters", "needed" if masters.needed else "not needed", border=True)

left, right = st.columns([3, 1], vertical_alignment="bottom")
with left:
    parameter = widgets.choose_layer(
        [str(p) for p in shown.by_parameter["parameter"]], "Parameter", "parameter"
    )
log = right.toggle("Log counts", value=False, key="update_log", bind="query-params")
widgets.show(
    run_cache.once(
        *(chosen, "ratios", parameter, log), make=lambda: shown.ratios(parameter, log=log)
    )
)
st.header("Updates that 16-bit weights round away", anchor=False)
widgets.table(shown.by_parameter, LABELS)
