"""Which dtype weights, gradients and optimizer states have, what it does, and what can be answered."""

from __future__ import annotations

import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import in_markdown, sentence
from mpdiag.reports.text.audit import sources
from mpdiag.reports.views.precision import MISSING, answers_frame, precision_frame

chosen = run_folder.current()
widgets.heading("Precision", chosen)
audit = run_cache.contents(chosen).audit
if audit is None:
    st.info(in_markdown(sentence(MISSING)))
else:
    st.markdown(f"**{in_markdown(sentence(audit.line))}**")
    widgets.table(precision_frame(audit))
    st.caption(" ".join(f"{title}: {in_markdown(words)}." for title, words in sources(audit)))
    st.header("Findings", anchor=False)
    if not audit.findings:
        st.markdown("No findings.")
    widgets.folded(audit.findings)
    st.header("What this recording can answer", anchor=False)
    st.table(
        answers_frame(audit.answers), hide_index=True
    )  # not a grid: its last column is a sentence
