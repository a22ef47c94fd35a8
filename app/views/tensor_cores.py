"""What a profile says: which kernels ran on Tensor Cores, what kept others off, what a fix gains."""

from __future__ import annotations

import math

import pandas as pd
import run_cache
import run_folder
import streamlit as st
import traces
import widgets

from mpdiag.display.wording import in_markdown, layer_name, percent, sentence
from mpdiag.errors import RunNotFound
from mpdiag.tensorcores.views import tensor_cores
from mpdiag.tensorcores.views.tensor_core_use import (
    cause_costs,
    cause_words,
    steps,
    summary_of,
)

chosen = run_folder.current() if run_folder.listings() else None
if chosen is None:
    st.title("Tensor Cores", anchor=False)
else:
    widgets.heading("Tensor Cores", chosen)
opened = traces.choose(chosen)
if opened is None and chosen is not None:
    try:
        profile = run_cache.profile(chosen)
    except RunNotFound:
        st.info(
            "This run has no profile yet. Open a trace above, or write a profile into its folder, on a "
            "machine with a GPU or from a trace:"
        )
        st.code(
            f"mpdiag profile TRACE --json > {chosen.folder}/profile.json",
            language="bash",
            wrap_lines=True,
        )
        st.stop()
elif opened is not None:
    profile = opened.document
else:
    st.stop()
run = "." if opened is not None or chosen is None else str(chosen.folder)

if profile.get("verdict"):
    st.markdown(f"**{in_markdown(str(profile['verdict']))}**")
cells = st.columns(4)
for cell, (label, value) in zip(cells, tensor_cores.headline(profile), strict=True):
    cell.metric(label, percent(value), border=True)
if profile.get("generated"):
    st.info(in_markdown(str(profile["generated"])), icon=":material/science:")
for words in summary_of(profile):
    st.markdown(in_markdown(words))
if opened is not None and opened.ranks is not None:
    st.markdown(f"**{in_markdown(str(opened.ranks['verdict']))}**")
    by_rank = pd.DataFrame(opened.ranks["ranks"]).drop(columns="trace")
    widgets.table(by_rank.rename(columns={"tensor_core_fraction": "Tensor Core share"}))
    st.caption(
        "Own: time outside exposed collectives. A collective is exposed while nothing is computed "
        "at the same time."
    )
    st.caption(in_markdown(f"The rest of this page shows the slowest rank, {opened.name}."))
widgets.show(tensor_cores.verdicts(run, profile))
costs = cause_costs(profile)
if costs:
    st.header("What each cause costs", anchor=False)
    for share, words, fix in costs:
        st.progress(min(1.0, share))
        st.markdown("  \n→ ".join(in_markdown(part) for part in (words, fix) if part))

for picture in steps(run, profile):
    widgets.show(picture)

operations = tensor_cores.operation_frame(profile)
fixable = tensor_cores.fixable(operations)
if not fixable.empty:
    st.header("What would a fix gain?", anchor=False)
    edited = st.data_editor(
        widgets.blank(fixable.assign(fixed=False, cause=fixable["cause"].map(cause_words))),
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
    if edited["fixed"].any():
        bound = tensor_cores.combined_bound(list(edited.loc[edited["fixed"], "amdahl_bound"]))
        words = f"{bound:.3g} ×" if bound < math.inf else "∞"
        st.metric("Faster by at most", words, border=True, width=240)
    else:
        st.caption("Tick fixes to see the largest possible speed-up of everything (Amdahl's law).")

on_cpu = tensor_cores.is_cpu(profile)
st.header("The longest primitives" if on_cpu else "The longest kernels", anchor=False)
if on_cpu:
    st.caption("From oneDNN's own log, which leaves out what oneDNN does not compute.")
kernels = tensor_cores.kernel_frame(profile)
kernels = kernels.drop(columns="verdict").dropna(axis=1, how="all")  # in words, as ``unit``
widgets.table(
    kernels.assign(**{c: kernels[c].fillna("") for c in kernels if kernels[c].dtype.kind == "O"})
)
with st.expander(f"All {len(operations)} operations"):
    widgets.table(operations.drop(columns=["m", "n", "k", "verdict"]))
for finding in profile.get("findings", []):
    parts = (str(finding.get("message") or ""), str(finding.get("fix") or ""))
    show = st.warning if finding.get("severity") in ("warning", "error") else st.info
    show("  \n→ ".join(in_markdown(sentence(part)) for part in parts if part))
    widgets.explain(str(finding.get("code") or ""))
st.caption(in_markdown(f"Source: {layer_name(str(profile.get('source') or 'unknown'))}"))
