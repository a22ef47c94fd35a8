"""What a run in progress shows so far, on every page of it: never taken for the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import run_cache
import run_folder
import streamlit as st

from mpdiag.analysis.verdict.evidence import failure_of
from mpdiag.display.wording import counted, in_markdown
from mpdiag.errors import MpdiagError

if TYPE_CHECKING:
    from mpdiag.runs.run import Listing, Run


def tell(listing: Listing) -> None:
    """Say that a run is in progress, how far it is, and what its steps show so far."""
    if listing.run is not None:
        st.info(in_markdown(words(listing, listing.run)), icon=":material/sensors:")


def words(listing: Listing, run: Run) -> str:
    """How far a run is, and its verdict so far."""
    what = "Training" if run.meta.get("training") else "Recording"
    seen, recorded = run.meta.get("steps_seen"), run.meta.get("steps_recorded")
    far = ""
    if isinstance(seen, int) and isinstance(recorded, int):
        far = f": {counted(seen, 'step')} so far, {recorded:,} of them recorded"
    age = run_folder.age_of(run.meta.get("updated"))
    ago = f", last written {age:.0f} s ago" if age is not None else ""
    text = f"{what} in progress{far}{ago}. This page follows it."
    if run.meta.get("training") or not run.parts():
        return text
    try:
        # That it may have been killed is said of a run that has fallen silent: this one has not.
        verdict = run_cache.analysis(listing).verdict.text.removeprefix(failure_of(run)).strip()
    except MpdiagError as error:
        verdict = str(error)
    return f"{text} What these steps show may change with the next ones. So far: {verdict}"
