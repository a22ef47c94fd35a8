"""What must stay in FP32 and why; how sensitive each operation is; the range of every output."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports import pictures
from mpdiag.reports.frames import operations, sensitivity

chosen = kit.current()
kit.heading("Operations", chosen)
analysis = kit.analysis(chosen)
run = str(chosen.folder)

st.subheader("Stay in FP32", anchor=False)
table = operations.operations_frame(analysis)
if table.empty:
    st.markdown(
        "Nothing needs FP32 beyond what the operation policy keeps there anyway (normalisations, "
        "softmax, losses)."
    )
else:
    kit.table(table)
proven = operations.proven_frame(analysis)
if len(proven):
    st.subheader("Proven by their own numbers", anchor=False)
    kit.table(proven)

found = kit.once(chosen, "sensitivity", make=lambda: sensitivity.ranking(chosen.folder, analysis))
kit.show(pictures.sensitivity(run, found))
kit.table(sensitivity.shown(found))
kit.show(pictures.output_ranges(run, kit.layers(chosen, "activation")))
st.subheader("The narrowest format that would hold each layer", anchor=False)
st.caption("It keeps 99 % of Σ|x| and does not overflow; gradients at the recommended loss scale.")
kit.table(operations.layer_formats_frame(analysis))
