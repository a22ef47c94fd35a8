"""Traces opened in the browser: one of the run's folder, or files from the user's disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import run_cache
import run_folder
import streamlit as st

from mpdiag.display.wording import in_markdown, sentence
from mpdiag.errors import MpdiagError
from mpdiag.reports.opened_trace import OpenedTrace, open_traces, traces_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.runs.run import Listing

STORED = "profile.json"
OPENED = "opened_trace"
"""Where a session keeps the trace that was opened from disk: its figures, not its bytes."""


def choose(chosen: Listing | None) -> OpenedTrace | None:
    """What to show: a trace that was opened from disk or lies with the run; None for its profile.json.

    What cannot be read says so on the page.
    """
    beside = _beside(chosen)
    kept: OpenedTrace | None = st.session_state.get(OPENED)
    with st.expander(
        "Open a trace", icon=":material/folder_open:", expanded=chosen is None or _bare(chosen)
    ):
        _upload()
    if kept is not None:
        left, right = st.columns([4, 1], vertical_alignment="center")
        left.markdown(f"Opened from disk: **{in_markdown(kept.name)}**")
        if right.button("Close", icon=":material/close:", key="close_trace"):
            del st.session_state[OPENED]
            st.rerun()
        _save(kept)
        return kept
    names = [path.name for path in beside]
    if chosen is not None and (chosen.folder / STORED).exists():
        names = [*names, STORED]
    if not names or names == [STORED]:
        return None
    name = names[0]
    if len(names) > 1:
        name = str(
            st.selectbox("Shown", names, key=f"trace-{run_folder.run_name(chosen)}")  # type: ignore[arg-type]
        )
    if name == STORED or chosen is None:
        return None
    found = run_cache.once(chosen, "trace", name, make=lambda: _opened(chosen.folder / name))
    if isinstance(found, OpenedTrace):
        return found
    st.error(in_markdown(sentence(str(found))), icon=":material/error:")
    return None


def _bare(chosen: Listing) -> bool:
    """Whether a run holds neither a profile nor a trace."""
    return not (chosen.folder / STORED).exists() and not _beside(chosen)


def _beside(chosen: Listing | None) -> list[Path]:
    return traces_beside(chosen.folder) if chosen is not None else []


def _opened(*paths: Path) -> OpenedTrace | str:
    try:
        return open_traces(paths)
    except MpdiagError as error:
        return str(error)


def usual(opened: OpenedTrace) -> str:
    """The name of the step to show first: the usual one, or else the first."""
    names = [work.step.name for work in opened.steps]
    timeline: Any = opened.document.get("timeline") or {}
    later = sorted(
        (step["wall_us"], str(step["name"] or "")) for step in timeline.get("steps", [])[1:]
    )
    middle = later[(len(later) - 1) // 2][1] if later else ""
    return middle if middle in names else names[0]


def _upload() -> None:
    """Read what was chosen from disk; its bytes are dropped as soon as they are read."""
    turn = st.session_state.setdefault("uploads", 0)
    problem = st.session_state.pop("upload_problem", None)
    if problem:
        st.error(in_markdown(sentence(problem)), icon=":material/error:")
    files = st.file_uploader(
        "A trace of torch.profiler, JAX, nsys, ncu, nvprof, rocprofv3 or rocprof; or one of each rank",
        accept_multiple_files=True,
        key=f"upload-{turn}",
    )
    st.caption(
        "It stays on this machine. Larger ones: put the file into a run's folder, or use "
        "`mpdiag profile TRACE`."
    )
    if not files:
        return
    with st.spinner("Reading the trace …"):
        found = _read(files)
    if isinstance(found, OpenedTrace):
        st.session_state[OPENED] = found
    else:
        st.session_state["upload_problem"] = found
    st.session_state["uploads"] = (
        turn + 1
    )  # another widget: Streamlit forgets the files of this one
    st.rerun()


def _read(files: Sequence[Any]) -> OpenedTrace | str:
    """Through files in a folder of its own, piece by piece: readers seek, and tell kinds by content."""
    with tempfile.TemporaryDirectory(prefix="mpdiag-") as folder:
        paths = []
        for i, file in enumerate(files):
            place = Path(folder) / str(i)
            place.mkdir()
            path = place / (Path(file.name).name or "trace")
            with path.open("wb") as target:
                shutil.copyfileobj(file, target, 1 << 20)
            paths.append(path)
        found = _opened(*paths)
        if isinstance(found, str):
            for path in paths:
                found = found.replace(str(path), path.name)
        return found


def _save(opened: OpenedTrace) -> None:
    """The document, which receipts read from here."""
    st.download_button(
        "profile.json",
        data=lambda: json.dumps(opened.document, indent=1),
        file_name=STORED,
        mime="application/json",
        icon=":material/download:",
        on_click="ignore",
        help="What mpdiag profile --json prints; the receipts of this page read it.",
    )
