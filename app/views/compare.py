"""Two runs side by side, layer by layer."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports import pictures
from mpdiag.reports.frames.comparing import apart, comparison_frame

st.header("Compare", anchor=False)
left, right = st.columns(2)
names = [kit.run_name(item) for item in kit.recorded()]
if len(names) < 2:
    st.info(
        "Two recorded runs are needed: record a second one, with another seed or format. The losses "
        "of a training by a plan are in *Training*; whether it trains as well, says "
        "`mpdiag compare A B`."
    )
    st.stop()
a = kit.choose_recorded("First run", "a", kit.pair()[0], where=left)
b = kit.choose_recorded("Second run", "b", kit.pair()[1], where=right)
first, second = st.columns([2, 2])
kind = first.selectbox(
    "Tensors",
    list(pictures.KIND_WORDS),
    format_func=lambda k: pictures.KIND_WORDS[k],
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
sides = (kit.analysis(a).layers, kit.analysis(b).layers)
only_a, only_b = apart(sides[0].of_kind(kind), sides[1].of_kind(kind))
if only_a or only_b:
    st.caption(f"{only_a} layers are in the first run alone, {only_b} in the second alone.")
one, two = st.columns(2)
one.caption(kit.describe(a))
one.markdown(kit.in_markdown(kit.analysis(a).verdict))
two.caption(kit.describe(b))
two.markdown(kit.in_markdown(kit.analysis(b).verdict))
titles = (kit.run_name(a), kit.run_name(b))
kit.show(
    pictures.side_by_side(str(a.folder), str(b.folder), sides, titles, kind, measure or "absmax")
)
kit.table(comparison_frame(sides[0].of_kind(kind), sides[1].of_kind(kind)))
