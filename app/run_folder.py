"""The folder of runs that this dashboard shows, and what can be said of each without analyzing it."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import run_list
import streamlit as st
from run_list import format_of, kind_of, model_of
from stamps import stamp_of_list

from mpdiag.display.wording import duration, in_markdown
from mpdiag.errors import MpdiagError, RunNotFound
from mpdiag.installation.bundled import sample_runs
from mpdiag.runs.run import META, Listing, Run, list_runs, open_run
from mpdiag.runs.training_log import FILE

SAMPLES = "samples"
"""The switch that shows the sample runs beside one's own: its key, and its name in a link."""
LIVE = ("recording", "training")
SHOWCASE = "ssd"
"""The sample run that shows most: without a loss scale its training fails, by the plan it does not."""
SILENT = 120
"""Seconds without a write after which a run that says it is recording may have been killed."""


def folder() -> Path:
    """The folder of runs this app was opened on; the sample runs if none was named."""
    named = os.environ.get("MPDIAG_RUNS")
    return Path(named) if named else sample_runs()


def samples() -> Path | None:
    """The bundled sample runs, if they are not what this app was opened on."""
    return _samples_beside(folder())


def _samples_beside(shown: Path) -> Path | None:
    bundled, own = _bundled(), shown.resolve()
    return None if own == bundled or bundled is None or bundled in own.parents else bundled


@cache
def _bundled() -> Path | None:
    try:
        return sample_runs().resolve()
    except RunNotFound:
        return None


def listings() -> list[Listing]:
    """The runs to choose from; a name in a link is only ever looked up here, never joined to a path.

    The bundled sample runs come after one's own, if the switch in the sidebar asks for them.
    """
    bundled = samples() if st.session_state.get(SAMPLES) else None
    return _own() + (_listed(bundled) if bundled is not None else [])


def _listed(root: Path) -> list[Listing]:
    """The runs in a folder, read anew only when a ``meta.json`` in it has changed.

    Each caller gets runs of its own: what a run has read of its other files may be out of date.
    """
    if not root.is_dir():
        return list_runs(root)  # says so
    found: list[Listing] = _read_list(str(root), stamp_of_list(root))
    return [replace(item, run=item.run and replace(item.run)) for item in found]


@st.cache_resource(max_entries=4, show_spinner=False)
def _read_list(root: str, moment: object) -> list[Listing]:
    return list_runs(root)


def _own() -> list[Listing]:
    root = folder()
    if not (root / META).is_file():
        return _listed(root)
    try:
        return [Listing(root, open_run(root), None)]
    except MpdiagError as error:
        return [Listing(root, None, str(error))]


def is_sample(listing: Listing) -> bool:
    """Whether a run is one of the bundled ones, shown beside one's own."""
    return listing.folder.parent == samples()


def run_name(listing: Listing) -> str:
    """What a run is called here; a sample run beside one's own by ``sample/`` and its name."""
    name = listing.folder.resolve().name
    return f"sample/{name}" if is_sample(listing) else name


def place_of(listing: Listing) -> Path:
    """The folder that holds a run."""
    return listing.folder.parent if listing.folder != folder() else listing.folder.resolve().parent


def is_recording(listing: Listing) -> bool:
    """Whether a run is a recording, not a training by a plan or a profile alone."""
    return kind_of(listing) == "recording"


def opened(listing: Listing) -> Run:
    """The run, or the sentence that says why it cannot be opened."""
    if listing.run is None:
        raise RunNotFound(listing.problem or "this run cannot be read")
    return listing.run


def current() -> Listing:
    """The run chosen in the sidebar."""
    known = {run_name(item): item for item in listings()}
    if not known:
        message = f"there are no runs in {folder()}: record one with mpdiag demo"
        raise RunNotFound(message)
    return known.get(st.session_state.get("run", "")) or first(list(known.values()))


def first(items: list[Listing]) -> Listing:
    """The run to open unasked: the newest recording of a step, of the sample runs ``SHOWCASE``.

    A training by a plan has no gradients to look at, and a recording without a step has nothing. What
    ``mpdiag search`` recorded for itself comes last.
    """
    recordings = [item for item in items if is_recording(item)]
    if folder().resolve() == _bundled():
        recordings.sort(key=lambda item: item.folder.name != SHOWCASE)
    recordings.sort(key=lambda item: item.run is not None and "made_for" in item.run.meta)
    with_steps = (item for item in recordings if item.run and item.run.meta.get("steps_recorded"))
    return next(with_steps, recordings[0] if recordings else items[0])


def places(listing: Listing) -> dict[str, int]:
    """The place of each run beside this one, which its colour goes by, by its folder's name."""
    root = place_of(listing)
    return run_list.places(item for item in listings() if place_of(item) == root)


def recorded() -> list[Listing]:
    """The runs that hold statistics."""
    return [item for item in listings() if item.run and item.run.parts()]


def logged() -> dict[str, Listing]:
    """The runs that kept a training log, by name."""
    return {
        run_name(item): item for item in listings() if item.run and (item.folder / FILE).is_file()
    }


def logged_beside(listing: Listing) -> dict[str, Listing]:
    """Those of them in the same folder as a run, by their folders' names, as receipts write them."""
    root = place_of(listing)
    found = (item for item in logged().values() if place_of(item) == root)
    return {item.folder.resolve().name: item for item in found}


def describe(listing: Listing, *, named: bool = True) -> str:
    """One line on a run: name, model, steps, state, when it was last written; Markdown-safe."""
    run = opened(listing)
    meta = run.meta
    words = [run_name(listing) if named else "", model_of(listing)]
    if meta.get("steps_recorded") is not None:
        words.append(
            f"{_number(meta['steps_recorded'])} of {_number(meta.get('steps_seen'))} steps recorded"
        )
    words.append(format_of(meta))
    words.append(state_of(meta))
    return in_markdown(" · ".join(word for word in words if word))


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def state_of(meta: Any) -> str:
    """A run's state in words, with how long ago it was last written if it is still going on."""
    state = str(meta.get("state") or "unknown")
    if state not in LIVE:
        return state
    age = age_of(meta.get("updated"))
    if age is None:
        return state
    words = f"{state}, last written {duration(age)} ago"
    return f"{words}; no longer running?" if age > SILENT else words


def age_of(moment: object) -> float | None:
    """Seconds since an ISO 8601 moment."""
    try:
        then = datetime.fromisoformat(str(moment))
    except ValueError:
        return None
    if then.tzinfo is None:
        return None
    return (datetime.now(timezone.utc) - then).total_seconds()


def live(listing: Listing) -> bool:
    """Whether a run is being written right now, as far as its files say."""
    if listing.run is None or listing.run.meta.get("state") not in LIVE:
        return False
    age = age_of(listing.run.meta.get("updated"))
    return age is not None and age <= SILENT
