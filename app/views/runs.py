"""The runs of the folder, from their meta.json alone; runs that are recording refresh by themselves."""

from __future__ import annotations

import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import in_markdown
from mpdiag.reports.views.runs import runs_frame

st.header("Runs", anchor=False)
found = run_folder.listings()
words = f"{len(found)} in {run_folder.folder()}, newest first. Select one here or in the sidebar."
st.caption(in_markdown(words))


@st.fragment(run_every=2 if any(run_folder.live(item) for item in found) else None)
def table() -> None:
    """The list, read anew each time."""
    rows = run_folder.listings()
    names = [run_folder.run_name(item) for item in rows]
    frame = runs_frame(
        rows, [run_folder.state_of(item.run.meta) if item.run else "" for item in rows]
    )
    frame["recorded"] = frame["recorded"].astype(object).where(frame["recorded"].notna(), "")
    st.dataframe(
        frame.astype({"recorded": str}),
        hide_index=True,
        key="chosen_row",
        on_select=lambda: widgets.choose_row(names),
        selection_mode="single-row",
        column_config={
            "recorded": "steps recorded",
            "created": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        },
    )
    if st.session_state.pop("row_was_chosen", False):
        st.rerun()  # the rest of the page shows the selected run


if found:
    table()
    for item in found:
        if item.problem:
            st.warning(in_markdown(item.problem), icon=":material/warning:")
    if (chosen := run_folder.current()).run is not None:
        st.subheader("Open", anchor=False)
        st.caption(run_folder.describe(chosen))
        with st.container(horizontal=True):
            if chosen.run.meta.get("profile_only"):
                widgets.link("tensor_cores", "Tensor Cores")
            else:
                widgets.link("verdict", "Verdict")
                widgets.link("gradients", "Gradients")
                widgets.link("training", "Training")
else:
    st.info("No runs here yet. Record one with `mpdiag demo`, or attach `mpdiag.record` to yours.")
