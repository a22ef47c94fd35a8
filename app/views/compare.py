"""Trainings side by side: losses, metrics with their intervals, and how far layers moved."""

from __future__ import annotations

import compared
import run_cache
import streamlit as st
import widgets

from mpdiag.analysis.comparison.compare import refuse_unused_precision
from mpdiag.display.wording import KIND_NAMES, in_markdown, sentence
from mpdiag.errors import MpdiagError
from mpdiag.reports.next_commands import compare_them
from mpdiag.reports.views.compare import (
    apart,
    comparison_frame,
    intervals,
    metric_sentence,
    remarks,
    side_by_side,
    side_losses,
    standing_frame,
)
from mpdiag.reports.views.overview import command_text

BADGES = {
    "equivalent": ("green", ":material/check_circle:"),
    "different": ("red", ":material/cancel:"),
    "inconclusive": ("orange", ":material/help:"),
}

st.title("Compare", anchor=False)
known = compared.known()
if len(known) < 2:
    st.info(
        "Two runs are needed: record a second one, with another seed, or train by the plan with "
        "`mpdiag train`."
    )
    st.stop()
names = list(known)
first, second = compared.default_pair(known)
left, right = st.columns(2)
a = left.selectbox("Reference", names, index=names.index(first), key="a", bind="query-params")
b = right.selectbox(
    "Candidate",
    names,
    index=None if second is None else names.index(second),
    key="b",
    bind="query-params",
    placeholder="Choose a run",
)
if b is None:
    st.info(
        f"No run here is related to {in_markdown(a)}: none was trained by its plan, none is of the "
        "same model. Runs of different models are compared only if you choose both."
    )
    st.stop()
others = [name for name in names if name not in (a, b)]
if st.session_state.setdefault("beside_of", (a, b)) != (a, b):  # of another pair: begin anew
    st.session_state["beside"] = [name for name in compared.related(a, known) if name in others]
    st.session_state["beside_of"] = (a, b)
beside = st.multiselect(
    "Beside them",
    others,
    default=[name for name in compared.related(a, known) if name in others],
    key="beside",
    bind="query-params",
    placeholder="Other runs, such as one in BF16",
)
for name in (a, b):  # as mpdiag compare does
    refuse_unused_precision(known[name])

different = compared.different_models(known[a], known[b])
if different:  # said before anything else
    st.warning(in_markdown(f"These are two different models: {different}."))
sides = [side for name in (a, b, *beside) if (side := compared.side(name, known[name])) is not None]
found = {side.name: compared.comparison(a, side.name, known) for side in sides if side.name != a}
chosen = found.get(b)
if chosen is not None and not isinstance(chosen, str):
    colour, icon = BADGES[chosen.verdict]
    badge = f":{colour}-badge[{icon} {chosen.verdict}]"
    st.header(f"{in_markdown(b)} against {in_markdown(a)}: {badge}", anchor=False)
    for metric in chosen.metrics:
        st.markdown(in_markdown(sentence(metric_sentence(metric))))
    upper, lower = st.columns([3, 2])
    with upper:
        paths = {side.name: str(known[side.name]) for side in sides}
        widgets.show(side_losses(sides, paths, chosen))
    with lower:
        widgets.show(intervals(str(known[a]), str(known[b]), chosen))
else:
    st.info(in_markdown(sentence(chosen or f"{a} has no training log to compare")))
if len(sides) > 1:
    tables = {name: one for name, one in found.items() if not isinstance(one, str)}
    widgets.table(standing_frame(sides, tables))
if chosen is not None and not isinstance(chosen, str):
    for words, fix in remarks(chosen):
        if words:
            st.warning("  \n".join(map(in_markdown, (words, *([f"→ {fix}"] if fix else [])))))
        else:
            st.info(in_markdown(fix), icon=":material/arrow_forward:")
    again = command_text(compare_them(known[a], known[b]))
    st.caption(f"As `mpdiag compare` says it; another margin: `{again} --margin NAME=VALUE`")

st.header("How far the layers moved", anchor=False)
listings = [compared.recorded(name) for name in (a, b)]
if listings[0] is None or listings[1] is None:
    lacking = [n for n, item in zip((a, b), listings, strict=True) if item is None]
    st.caption(
        in_markdown(
            f"Two recordings are needed for it: {' and '.join(lacking)} "
            f"{'holds' if len(lacking) == 1 else 'hold'} no statistics of gradients."
        )
    )
    st.stop()
cells = st.columns(2, vertical_alignment="bottom")
kind = cells[0].selectbox(
    "Tensors",
    list(KIND_NAMES),
    format_func=lambda k: KIND_NAMES[k],
    key="kind",
    bind="query-params",
)
measure = cells[1].segmented_control(
    "Measure",
    ["absmax", "underflow", "overflow"],
    default="absmax",
    required=True,
    format_func={"absmax": "largest |x|", "underflow": "lost to 0", "overflow": "overflow"}.get,
    key="measure",
    bind="query-params",
)
try:
    of_a, of_b = (run_cache.analysis(item) for item in listings if item is not None)
except MpdiagError as error:
    st.info(in_markdown(sentence(str(error))))
    st.stop()
layers = (of_a.layers, of_b.layers)
only_a, only_b = apart(layers[0].of_kind(kind), layers[1].of_kind(kind))
if only_a or only_b:
    st.caption(
        f"{only_a} layers are in {in_markdown(a)} alone, {only_b} in {in_markdown(b)} alone."
    )
widgets.show(side_by_side(str(known[a]), str(known[b]), layers, (a, b), kind, measure or "absmax"))
widgets.table(comparison_frame(layers[0].of_kind(kind), layers[1].of_kind(kind)))
