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

import layer_links  # noqa: E402 - found beside this file
import run_folder  # noqa: E402 - likewise
import widgets  # noqa: E402 - likewise

from mpdiag.errors import MpdiagError  # noqa: E402
from mpdiag.profiler import is_installed  # noqa: E402

# The menu, in its order: each page's file in ``views``, its title and a Material symbol.
PAGES = (
    ("runs", "Runs", "list"),
    ("overview", "Overview", "dashboard"),
    ("verdict", "Verdict", "gavel"),
    ("precision", "Precision", "straighten"),
    ("gradients", "Gradients", "equalizer"),
    ("layers", "Layers", "account_tree"),
    ("updates", "Updates", "moving"),
    ("operations", "Operations", "function"),
    ("formats", "Formats", "grid_on"),
    *([("tensor_cores", "Tensor Cores", "memory")] if is_installed() else []),
    ("training", "Training", "show_chart"),
    ("compare", "Compare", "compare_arrows"),
)

STYLE = """<style>
.stMainBlockContainer { padding: 3rem 2.5rem 3rem; }
[data-testid="stAlertContainer"] { padding: 0.6rem 0.9rem; }
[data-testid="stCaptionContainer"] { color: inherit; opacity: 0.78; }
.stMainBlockContainer h1 { padding: 0; font-size: 2.1rem; }
.stMainBlockContainer h2 { padding: 0.3rem 0 0.7rem; font-size: 1.25rem; }
[data-testid="stMultiSelect"] [data-tag] { background-color: #1f6aa5; }  /* under white */
@media (max-width: 640px) {
    .stMainBlockContainer { padding: 3.9rem 1rem 3rem; }
    .js-plotly-plot .modebar-container { display: none; }  /* it would lie over the legend */
}
</style>"""


def start() -> None:
    """What the bare address opens: the overview of a run, or the list where there is none."""
    page = "overview" if run_folder.listings() else "runs"
    st.switch_page(f"views/{page}.py", query_params=st.query_params.to_dict())


st.set_page_config("mpdiag", page_icon=f"{HERE}/icon.png", layout="wide")
st.logo(f"{HERE}/logo.svg", size="large")
st.html(STYLE)
first = st.Page(start, title="Start", default=True, visibility="hidden")
page = st.navigation(
    [
        first,
        *(
            st.Page(f"views/{name}.py", title=title, icon=f":material/{icon}:")
            for name, title, icon in PAGES
        ),
    ]
)
chosen = None
try:
    if page is not first:
        layer_links.take_opened()
        chosen = widgets.sidebar()
    if chosen is not None and run_folder.live(chosen):
        widgets.follow(chosen)
    page.run()
except MpdiagError as error:
    widgets.complain(error, chosen)
    widgets.ways_on()
