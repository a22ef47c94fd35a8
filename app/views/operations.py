"""What must stay in FP32 and why, beside the range of every output."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports import pictures

chosen = kit.current()
kit.heading("Operations", chosen)
analysis = kit.analysis(chosen)
run = str(chosen.folder)

st.subheader("Stay in FP32", anchor=False)
table = pictures.operations_frame(analysis)
if table.empty:
    st.markdown(
        "No module needs FP32: none is a normalisation, a softmax or a loss, none overflows."
    )
else:
    kit.table(table)
proven = pictures.proven_frame(analysis)
if len(proven):
    st.subheader("Proven by their own numbers", anchor=False)
    kit.table(proven)
kit.show(pictures.output_ranges(run, kit.layers(chosen, "activation")))
st.subheader("The narrowest format that would hold each layer", anchor=False)
st.caption("It keeps 99 % of Σ|x| and does not overflow; gradients at the recommended loss scale.")
kit.table(pictures.layer_formats_frame(analysis))
