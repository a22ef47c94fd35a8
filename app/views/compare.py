"""Two runs side by side, layer by layer."""

from __future__ import annotations

import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.analysis.comparison.half_precision import refuse_unused_precision
from mpdiag.analysis.comparison.models import relate_models
from mpdiag.display.wording import KIND_NAMES, in_markdown
from mpdiag.reports.views.compare import apart, comparison_frame, side_by_side

st.header("Compare", anchor=False)
left, right = st.columns(2)
names = [run_folder.run_name(item) for item in run_folder.recorded()]
if len(names) < 2:
    st.info(
        "Two recorded runs are needed: record a second one, with another seed or format. The losses "
        "of a training by a plan are in *Training*; `mpdiag compare A B` tests whether it trains as "
        "well as FP32."
    )
    st.stop()
first_run, second_run = run_cache.pair()
a = widgets.choose_recorded("First run", "a", first_run, where=left)
b = widgets.choose_recorded("Second run", "b", second_run, where=right)
if a is None or b is None:
    st.info(
        "No other recorded run here is of the same model, and runs of different models are compared "
        "only if you choose both."
    )
    st.stop()
for side in (a, b):  # as mpdiag compare does
    refuse_unused_precision(side.folder)
relation = relate_models(run_cache.model(a), run_cache.model(b))
if relation is not None and relation.different:
    st.warning(in_markdown(f"These are two different models: {relation.words}."))
first, second = st.columns([2, 2])
kind = first.selectbox(
    "Tensors",
    list(KIND_NAMES),
    format_func=lambda k: KIND_NAMES[k],
    key="kind",
    bind="query-params",
)
measure = second.segmented_control(
    "Measure",
    ["absmax", "underflow", "overflow"],
    default="absmax",
    required=True,
    format_func={"absmax": "largest |x|", "underflow": "lost to 0", "overflow": "overflow"}.get,
    key="measure",
    bind="query-params",
)
sides = (run_cache.analysis(a).layers, run_cache.analysis(b).layers)
only_a, only_b = apart(sides[0].of_kind(kind), sides[1].of_kind(kind))
if only_a or only_b:
    st.caption(f"{only_a} layers are in the first run alone, {only_b} in the second alone.")
one, two = st.columns(2)
one.caption(run_folder.describe(a))
one.markdown(in_markdown(run_cache.analysis(a).verdict.text))
two.caption(run_folder.describe(b))
two.markdown(in_markdown(run_cache.analysis(b).verdict.text))
titles = (run_folder.run_name(a), run_folder.run_name(b))
widgets.show(side_by_side(str(a.folder), str(b.folder), sides, titles, kind, measure or "absmax"))
widgets.table(comparison_frame(sides[0].of_kind(kind), sides[1].of_kind(kind)))
