"""The runs of the folder, from their meta.json alone; those still recording refresh by themselves."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.reports.frames.runs import runs_frame
from mpdiag.reports.words import in_markdown

st.header("Runs", anchor=False)
found = kit.listings()
words = f"{len(found)} in {kit.folder()}, newest first. Choose one here, or at the left."
st.caption(in_markdown(words))


@st.fragment(run_every=2 if any(kit.live(item) for item in found) else None)
def table() -> None:
    """The list, read anew each time."""
    rows = kit.listings()
    names = [kit.run_name(item) for item in rows]
    frame = runs_frame(rows, [kit.state_of(item.run.meta) if item.run else "" for item in rows])
    frame["recorded"] = frame["recorded"].astype(object).where(frame["recorded"].notna(), "")
    st.dataframe(
        frame.astype({"recorded": str}),
        hide_index=True,
        key="chosen_row",
        on_select=lambda: kit.choose_row(names),
        selection_mode="single-row",
        column_config={
            "recorded": "steps recorded",
            "created": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        },
    )
    if st.session_state.pop("row_was_chosen", False):
        st.rerun()  # the rest of the page speaks of the chosen run


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
