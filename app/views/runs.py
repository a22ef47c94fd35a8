"""The runs of the folder, from their meta.json alone; those still recording refresh by themselves."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports.frames.runs import runs_frame
from mpdiag.reports.words import in_markdown

st.header("Runs", anchor=False)
found = kit.listings()
st.caption(in_markdown(f"{len(found)} in {kit.folder()}, newest first"))


@st.fragment(run_every=2 if any(kit.live(item) for item in found) else None)
def table() -> None:
    """The list, read anew each time."""
    rows = kit.listings()
    frame = runs_frame(rows, [kit.state_of(item.run.meta) if item.run else "" for item in rows])
    st.dataframe(
        frame,
        hide_index=True,
        column_config={
            "recorded": st.column_config.NumberColumn("steps recorded"),
            "created": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        },
    )


if found:
    table()
    for item in found:
        if item.problem:
            st.warning(in_markdown(item.problem), icon=":material/warning:")
    if (chosen := kit.current()).run is not None:
        st.subheader("Look into the chosen run", anchor=False)
        st.caption(kit.describe(chosen))
        with st.container(horizontal=True):
            kit.link("verdict", "Its verdict")
            kit.link("gradients", "Its gradients")
            kit.link("training", "Its training")
else:
    st.info("No runs here yet. Record one with `mpdiag demo`, or attach `mpdiag.record` to yours.")
