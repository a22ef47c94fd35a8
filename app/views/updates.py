"""Weight updates beside their weights: what a 16-bit weight would swallow."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports import pictures
from mpdiag.reports.frames.updates import update_frame
from mpdiag.reports.words import in_markdown, layer_name, percent, sentence

chosen = kit.current()
kit.heading("Updates", chosen)
analysis = kit.analysis(chosen)
masters = analysis.plan.master_weights
records = analysis.run.records
run = str(chosen.folder)
st.markdown(in_markdown(sentence(masters.reason)))

table = kit.once(chosen, "update table", make=lambda: update_frame(records))
cells = st.columns(3)
cells[0].metric("Swallowed by FP16 weights", percent(masters.swallowed_fraction), border=True)
cells[1].metric("Worst parameter", layer_name(masters.worst_parameter), border=True)
cells[2].metric("FP32 masters", "needed" if masters.needed else "not needed", border=True)

left, right = st.columns([3, 1], vertical_alignment="bottom")
with left:
    parameter = kit.choose_layer([str(p) for p in table["parameter"]], "Parameter", "parameter")
log = right.toggle("Log counts", value=False, key="update_log", bind="query-params")
kit.show(
    kit.once(
        chosen,
        *("ratios", parameter, log),
        make=lambda: pictures.ratios(run, records, parameter, log=log),
    )
)
one, two = st.columns(2, gap="large")
with one:
    kit.show(
        kit.once(chosen, "swallowed", make=lambda: pictures.swallowed(run, records, frame=table))
    )
with two:
    kit.show(
        kit.once(
            chosen,
            *("swallowed over time", parameter),
            make=lambda: pictures.swallowed_over_time(run, records, parameter),
        )
    )
kit.table(table)
