"""What must stay in FP32 and why, and how sensitive each operation is."""

from __future__ import annotations

import pandas as pd
import run_cache
import run_folder
import streamlit as st
import widgets
from proven_operations import proven_frame

from mpdiag.analysis.figures import at_scale
from mpdiag.display.wording import layer_name
from mpdiag.numerics.formats import FORMATS
from mpdiag.reports.views import operations

chosen = run_folder.current()
widgets.heading("Operations", chosen)
analysis = run_cache.analysis(chosen)
run = str(chosen.folder)

st.header("Stay in FP32", anchor=False)
table = operations.operations_frame(analysis)
if table.empty:
    st.markdown("Only autocast's own list stays in FP32 (normalisations, softmax, losses).")
else:
    widgets.table(table)
proven = proven_frame(analysis)
if len(proven):
    st.header("Proven by the recorded values", anchor=False)
    widgets.table(proven)

contents = run_cache.contents(chosen)
found = run_cache.once(chosen, "ranking", make=lambda: operations.ranking(contents))
widgets.show(operations.sensitivity(run, found))
widgets.table(operations.shown(found))
st.header("Narrowest format of each layer", anchor=False)
scaled = at_scale(analysis.plan.loss_scale.recommended)
st.caption(
    "The format keeps 99 % of Σ|x| over all recorded steps and does not overflow "
    f"(gradients {scaled})."
)
narrowest = [
    {
        "layer": layer_name(advice.name),
        "tensors": advice.kind.replace("_", " "),
        "format": FORMATS[advice.format].label,
        "largest |x|": advice.evidence.get("absmax"),
    }
    for advice in analysis.plan.layer_formats
]
columns = ["layer", "tensors", "format", "largest |x|"]
widgets.table(pd.DataFrame(narrowest, columns=columns))
