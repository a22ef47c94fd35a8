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
from opened_trace import OpenedTrace, open_traces, traces_beside

from mpdiag.display.wording import in_markdown, sentence
from mpdiag.errors import MpdiagError

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
    assert chosen is not None
    name = names[0]
    if len(names) > 1:
        key = f"trace-{run_folder.run_name(chosen)}"
        name = str(st.selectbox("Shown", names, index=_first(chosen, names), key=key))
    if name == STORED:
        return None
    found = _trace(chosen, name)
    if isinstance(found, OpenedTrace):
        return found
    st.error(in_markdown(sentence(str(found))), icon=":material/error:")
    return None


def _bare(chosen: Listing) -> bool:
    """Whether a run holds neither a profile nor a trace."""
    return not (chosen.folder / STORED).exists() and not _beside(chosen)


def _beside(chosen: Listing | None) -> list[Path]:
    return traces_beside(chosen.folder) if chosen is not None else []


def _first(chosen: Listing, names: Sequence[str]) -> int:
    """The place of what is shown first: of the files, which may be notes, the first that is a trace."""
    shown = (
        i
        for i, name in enumerate(names)
        if name == STORED or isinstance(_trace(chosen, name), OpenedTrace)
    )
    return next(shown, 0)


def _trace(chosen: Listing, name: str) -> OpenedTrace | str:
    """A trace in a run's folder, read once for each state of its file."""
    path = chosen.folder / name
    try:
        status = path.stat()
    except OSError as error:
        return str(error)
    key = ("trace", name, status.st_mtime_ns, status.st_size)
    found: OpenedTrace | str = run_cache.once(chosen, *key, make=lambda: _opened(path))
    return found


def _opened(*paths: Path) -> OpenedTrace | str:
    try:
        return open_traces(paths)
    except (MpdiagError, OSError) as error:
        return str(error)


def _upload() -> None:
    """Read what was chosen from disk; its bytes are dropped as soon as they are read."""
    turn = st.session_state.setdefault("uploads", 0)
    problem = st.session_state.pop("upload_problem", None)
    if problem:
        st.error(in_markdown(sentence(problem)), icon=":material/error:")
    files = st.file_uploader(
        "A trace of torch.profiler, nsys, ncu, nvprof or rocprofv3, or one trace per rank",
        accept_multiple_files=True,
        key=f"upload-{turn}",
    )
    st.caption(
        "The file stays on this machine. Put a larger one into a run's folder, or run "
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
        try:
            paths = [_written(Path(folder) / str(i), file) for i, file in enumerate(files)]
        except OSError as error:  # the disk may be full
            return f"cannot store the file to read it ({error.strerror or error})"
        found = _opened(*paths)
        if isinstance(found, str):
            for path in paths:
                found = found.replace(str(path), path.name)
        return found


def _written(place: Path, file: Any) -> Path:
    """A file in a folder of its own, by its name as far as that can be one."""
    place.mkdir()
    name = Path(file.name.replace("\0", "")).name
    end = name.encode(errors="ignore")[-200:].decode(errors="ignore")
    path = place / ("trace" if end in ("", ".", "..") else end)
    with path.open("wb") as target:
        shutil.copyfileobj(file, target, 1 << 20)
    return path


def _save(opened: OpenedTrace) -> None:
    """The document, which receipts read from here."""
    st.download_button(
        "profile.json",
        data=lambda: json.dumps(opened.document, indent=1),
        file_name=STORED,
        mime="application/json",
        icon=":material/download:",
        on_click="ignore",
        help="The output of mpdiag profile --json. The receipts of this page read it.",
    )
