"""What a profile says: which kernels ran on Tensor Cores, what kept others off, what a fix wins."""

from __future__ import annotations

import math

import kit
import streamlit as st

from mpdiag.errors import RunNotFound
from mpdiag.reports import pictures
from mpdiag.reports.frames import tensorcores
from mpdiag.reports.words import in_markdown, layer_name, percent, sentence

chosen = kit.current()
kit.heading("Tensor Cores", chosen)
run = str(chosen.folder)
try:
    profile = tensorcores.read_profile(kit.opened(chosen).folder)
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
for cell, (label, value) in zip(cells, tensorcores.headline(profile), strict=True):
    cell.metric(label, percent(value), border=True)
kit.show(pictures.verdicts(run, profile))

st.subheader("What would a fix win?", anchor=False)
operations = tensorcores.operation_frame(profile)
fixable = tensorcores.fixable(operations)
if fixable.empty:
    st.markdown("No operation has a known fix that would make the whole any faster.")
else:
    st.caption("Tick fixes: the bound is Amdahl's, the most that everything could become faster.")
    edited = st.data_editor(
        kit.blank(fixable.assign(fixed=False)),
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
    bound = tensorcores.combined_bound(list(edited.loc[edited["fixed"], "amdahl_bound"]))
    words = f"{bound:.3g} ×" if bound < math.inf else "∞"
    st.metric("At most faster by", words, border=True, width=240)

kit.show(pictures.roofline(run, profile))
kit.show(pictures.kernels(run, profile))
kernels = tensorcores.kernel_frame(profile)
kit.table(kernels)
with st.expander(f"All {len(operations)} matrix operations"):
    kit.table(operations.drop(columns=["m", "n", "k"]))
for finding in profile.get("findings", []):
    parts = (str(finding.get("message") or ""), str(finding.get("fix") or ""))
    show = st.warning if finding.get("severity") in ("warning", "error") else st.info
    show("  \n→ ".join(in_markdown(sentence(part)) for part in parts if part))
st.caption(in_markdown(f"Source: {layer_name(str(profile.get('source') or 'unknown'))}"))
