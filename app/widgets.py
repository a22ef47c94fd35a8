"""What the pages share on screen: choosing runs and layers, pictures, tables, links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import run_cache
import run_folder
import streamlit as st
from figure_card import figure_card

from mpdiag.display.explanations import explanation
from mpdiag.display.wording import in_markdown, layer_name
from mpdiag.reports.views.training import family

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from mpdiag.reports.picture import Picture
    from mpdiag.runs.run import Listing

ALL = "(all together)"


def choose_run(label: str = "Run", key: str = "run") -> Listing | None:
    """A select box of the folder's runs, remembered in the address."""
    known = {run_folder.run_name(item): item for item in run_folder.listings()}
    if not known:
        return None
    # The newest recording first: a training by a plan has no gradients to look at.
    first = next(
        (name for name, item in known.items() if run_folder.is_recording(item)), next(iter(known))
    )
    names = [first, *(name for name in known if name != first)]
    asked = st.query_params.get(key)
    if asked and asked not in known:
        words = f"This link points to run {asked}, which is not in this folder. Showing {first}."
        st.warning(in_markdown(words), icon=":material/link_off:")
    return known.get(st.sidebar.selectbox(label, names, key=key, bind="query-params"))


def choose_row(names: Sequence[str]) -> None:
    """Take the run whose row was ticked in the list of runs."""
    rows = st.session_state["chosen_row"]["selection"]["rows"]
    if rows and rows[0] < len(names):
        st.session_state["run"] = names[rows[0]]
        st.session_state["row_was_chosen"] = True


def choose_recorded(label: str, key: str, index: int | None, *, where: Any) -> Listing | None:
    """A select box of the runs that hold statistics; None as long as nothing is chosen."""
    known = {run_folder.run_name(item): item for item in run_folder.recorded()}
    name = where.selectbox(
        label,
        list(known),
        index=index,
        key=key,
        bind="query-params",
        placeholder="Choose a run",
    )
    return known.get(name)


def choose_layer(names: Sequence[str], label: str = "Layer", key: str = "layer") -> str | None:
    """A select box of layers that is searched by typing; None for all of them."""
    known = {ALL: None, **{layer_name(name): name for name in names}}
    return known[st.selectbox(label, list(known), key=key, bind="query-params")]


def show(picture: Picture) -> None:
    """A figure with its caption, its receipt and its downloads."""
    figure_card(picture)


def explain(code: str) -> None:
    """What a finding means, folded away below it; nothing for a code that no finding has.

    Its example is of another run, whose figures would stand among this one's.
    """
    page = explanation(code)
    if page is None:
        return
    with st.expander(f"What {code} means", icon=":material/help:"):
        for title in ("What it means", "How it was computed", "How to fix it"):
            st.markdown(f"**{title}**\n\n{page.sections[title]}")


def table(frame: pd.DataFrame) -> None:
    """A table: the model by its name, shares in percent, what is missing left blank."""
    shown = blank(frame)
    for name in ("layer", "parameter", "name"):
        if name in shown:
            shown[name] = shown[name].map(lambda value: layer_name(str(value)))
    st.dataframe(shown, hide_index=True, column_config={c: _column(c, shown[c]) for c in shown})


def blank(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with blanks for what is missing, which would be shown as "None"."""
    shown = frame.copy()
    for name in shown.columns[shown.isna().any()]:
        if shown[name].isna().all() or shown[name].dtype == object:
            shown[name] = shown[name].astype(object).where(shown[name].notna(), "").map(str)
    return shown


EXACT = 1e5
"""Numbers from which rounding to a few digits would mislead."""
_SHARES = ("share", "underflow_a", "underflow_b", "overflow_a", "overflow_b", "beyond_2048")
_MAGNITUDES = ("absmax", "largest", "relative", "estimate")


def _column(name: str, values: pd.Series[Any]) -> Any:
    """How a column is shown: its name in words, its numbers as they are read."""
    label = name.replace("_", " ")
    if values.dtype.kind not in "iuf":
        return label
    if name.endswith(_SHARES):
        return st.column_config.NumberColumn(label, format="percent")
    if values.dtype.kind == "f" and (name.startswith(_MAGNITUDES) or " error" in name):
        return st.column_config.NumberColumn(label, format="%.3g")
    if values.dtype.kind == "f":
        large = bool((values.abs() >= EXACT).any())  # a scale of 131072 keeps all its digits
        return st.column_config.NumberColumn(label, format="%.9g" if large else "%.5g")
    return st.column_config.NumberColumn(label, format="localized")


def heading(title: str, listing: Listing) -> None:
    """A view's title and the run it speaks of."""
    st.header(title, anchor=False)
    st.caption(run_folder.describe(listing))


def follow(listing: Listing) -> None:
    """Show the view anew whenever a live run has grown."""
    seen = run_cache.stamp(listing.folder)

    @st.fragment(run_every=2)
    def watch() -> None:
        if run_cache.stamp(listing.folder) != seen:
            st.rerun()

    watch()


def ways_on() -> None:
    """Where to go from a training by a plan, which has no gradients to look at."""
    runs = {run_folder.run_name(item): item for item in run_folder.listings()}
    name = st.session_state.get("run", "")
    run = runs[name].run if name in runs else None
    if run is not None and run.meta.get("profile_only"):
        link("tensor_cores", "Tensor Cores")
    if run is None or not run.meta.get("training"):
        return
    root = family(name, runs)[0]
    with st.container(horizontal=True):
        if root != name and run_folder.is_recording(runs[root]):
            link("verdict", f"The recording {in_markdown(root)}", run=root)
        link("training", "Training")


def link(page: str, label: str, **query: str) -> None:
    """A link to another view of the same run."""
    run = st.session_state.get("run")
    values = {**({"run": run} if run else {}), **query}
    st.page_link(
        f"views/{page}.py", label=label, icon=":material/arrow_forward:", query_params=values
    )
