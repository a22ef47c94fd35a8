"""The dashboard's router: which views there are, and the run they speak of.

Opened by ``mpdiag dashboard [RUNS]``; ``streamlit run app/main.py`` shows the sample runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import kit  # noqa: E402 - found beside this file

from mpdiag.errors import MpdiagError  # noqa: E402
from mpdiag.reports.words import in_markdown  # noqa: E402

VIEWS = {
    "runs": ("Runs", "list"),
    "verdict": ("Verdict", "gavel"),
    "gradients": ("Gradients", "equalizer"),
    "updates": ("Updates", "moving"),
    "operations": ("Operations", "function"),
    "tensor_cores": ("Tensor Cores", "memory"),
    "training": ("Training", "show_chart"),
    "compare": ("Compare", "compare_arrows"),
}

st.set_page_config("mpdiag", page_icon=f"{HERE}/icon.png", layout="wide")
st.logo(f"{HERE}/logo.svg", size="large")
st.html("<style>.stMainBlockContainer { padding-top: 3.2rem; }</style>")
page = st.navigation(
    [
        st.Page(f"views/{name}.py", title=title, icon=f":material/{icon}:", default=name == "runs")
        for name, (title, icon) in VIEWS.items()
    ]
)
try:
    chosen = kit.choose_run()
    if chosen is not None and kit.live(chosen):
        kit.follow(chosen)
    page.run()
except MpdiagError as error:
    st.error(in_markdown(str(error)), icon=":material/error:")
    kit.ways_on()
st.sidebar.caption(in_markdown(f"Runs in {kit.folder()}"))
