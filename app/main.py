"""The dashboard's router: its pages, and the run that they show.

Opened by ``mpdiag dashboard [RUNS]``; ``streamlit run app/main.py`` shows the sample runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import run_folder  # noqa: E402 - found beside this file
import widgets  # noqa: E402 - likewise

from mpdiag.display.wording import in_markdown  # noqa: E402
from mpdiag.errors import MpdiagError  # noqa: E402
from mpdiag.reports.registry import VIEWS  # noqa: E402

st.set_page_config("mpdiag", page_icon=f"{HERE}/icon.png", layout="wide")
st.logo(f"{HERE}/logo.svg", size="large")
st.html("<style>.stMainBlockContainer { padding-top: 3.2rem; }</style>")
page = st.navigation(
    [
        st.Page(
            f"views/{view.name}.py",
            title=view.title,
            icon=f":material/{view.icon}:",
            default=view.name == "runs",
        )
        for view in VIEWS
    ]
)
try:
    chosen = widgets.choose_run()
    if chosen is not None and run_folder.live(chosen):
        widgets.follow(chosen)
    page.run()
except MpdiagError as error:
    st.error(in_markdown(str(error)), icon=":material/error:")
    widgets.ways_on()
st.sidebar.caption(in_markdown(f"Runs in {run_folder.folder()}"))
