"""What a profile says: which kernels ran on Tensor Cores, what kept others off, what a fix gains."""

from __future__ import annotations

import math

import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import in_markdown, layer_name, percent, sentence
from mpdiag.errors import RunNotFound
from mpdiag.reports.views import tensor_cores
from mpdiag.reports.views.roofline import roofline
from mpdiag.reports.views.tensor_core_use import cause_rows, summary_of, use_pictures

chosen = run_folder.current()
widgets.heading("Tensor Cores", chosen)
run = str(chosen.folder)
try:
    profile = run_cache.profile(chosen)
except RunNotFound:
    st.info(
        "This run has no profile yet. Write one into its folder, on a machine with a GPU or from a "
        "trace, and it shows here:"
    )
    st.code(f"mpdiag profile TRACE --json > {run}/profile.json", language="bash")
    st.stop()

if profile.get("verdict"):
    st.markdown(f"**{in_markdown(str(profile['verdict']))}**")
cells = st.columns(4)
for cell, (label, value) in zip(cells, tensor_cores.headline(profile), strict=True):
    cell.metric(label, percent(value), border=True)
if profile.get("generated"):
    st.info(in_markdown(str(profile["generated"])), icon=":material/science:")
for words in summary_of(profile):
    st.markdown(in_markdown(words))
widgets.show(tensor_cores.verdicts(run, profile))
for picture in use_pictures(run, profile):
    widgets.show(picture)

causes = cause_rows(profile)
if causes:
    st.subheader("What each cause costs", anchor=False)
    for words, fix in causes:
        st.markdown(f"**{in_markdown(words)}**  \n→ {in_markdown(fix)}")

st.subheader("What would a fix gain?", anchor=False)
operations = tensor_cores.operation_frame(profile)
fixable = tensor_cores.fixable(operations)
if fixable.empty:
    st.markdown("No operation has a known fix that would make the step faster.")
else:
    st.caption("Tick fixes: the bound is Amdahl's, the most that everything could become faster.")
    edited = st.data_editor(
        widgets.blank(fixable.assign(fixed=False)),
        hide_index=True,
        disabled=[c for c in fixable.columns if c != "fixed"],
        column_order=["fixed", "module", "op", "shape", "padded", "cause", "fix", "time_us"],
        column_config={
            "shape": "M × N × K",
            "padded": "pad to",
            "time_us": st.column_config.NumberColumn("time (µs)", format="%.1f"),
        },
        key="fixes",
    )
    bound = tensor_cores.combined_bound(list(edited.loc[edited["fixed"], "amdahl_bound"]))
    words = f"{bound:.3g} ×" if bound < math.inf else "∞"
    st.metric("At most faster by", words, border=True, width=240)

widgets.show(roofline(run, profile, tensor_cores.unit_names(profile)))
widgets.show(tensor_cores.kernels(run, profile))
kernels = tensor_cores.kernel_frame(profile)
widgets.table(kernels.drop(columns="verdict"))  # in words, as ``unit``
with st.expander(f"All {len(operations)} matrix operations"):
    widgets.table(operations.drop(columns=["m", "n", "k"]))
for finding in profile.get("findings", []):
    parts = (str(finding.get("message") or ""), str(finding.get("fix") or ""))
    show = st.warning if finding.get("severity") in ("warning", "error") else st.info
    show("  \n→ ".join(in_markdown(sentence(part)) for part in parts if part))
    widgets.explain(str(finding.get("code") or ""))
st.caption(in_markdown(f"Source: {layer_name(str(profile.get('source') or 'unknown'))}"))
