"""What the views share: the folder of runs, the chosen run, caches keyed by file time, pictures."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.errors import MpdiagError, RunNotFound
from mpdiag.installation.bundled import sample_runs
from mpdiag.numerics.formats import FP16
from mpdiag.reports.csv_text import csv_text
from mpdiag.reports.frames.gradients import in_model_order
from mpdiag.reports.frames.training import family
from mpdiag.reports.words import duration, in_markdown, layer_name
from mpdiag.runs.run import META, Listing, Run, list_runs, open_run
from mpdiag.runs.training_log import FILE, TrainingLog, read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from mpdiag.analysis.layers import Layers
    from mpdiag.reports.pictures import Picture
    from mpdiag.runs.schema import Kind

LIVE = ("recording", "training")
ALL = "(all together)"
SILENT = 120
"""Seconds after which a run that says it is recording is called silent: it may have been killed."""


# -- the folder ------------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of runs this app was opened on; the sample runs if none was named."""
    named = os.environ.get("MPDIAG_RUNS")
    return Path(named) if named else sample_runs()


def listings() -> list[Listing]:
    """The runs to choose from; a name in a link is only ever looked up here, never joined to a path."""
    root = folder()
    if not (root / META).is_file():
        return list_runs(root)
    try:
        return [Listing(root, open_run(root), None)]
    except MpdiagError as error:
        return [Listing(root, None, str(error))]


def run_name(listing: Listing) -> str:
    """What a run is called here."""
    return listing.folder.resolve().name


def choose_run(label: str = "Run", key: str = "run") -> Listing | None:
    """A select box of the folder's runs, remembered in the address."""
    known = {run_name(item): item for item in listings()}
    if not known:
        return None
    # The newest recording first: a training by a plan has no gradients to look at.
    first = next((name for name, item in known.items() if _is_recording(item)), next(iter(known)))
    names = [first, *(name for name in known if name != first)]
    asked = st.query_params.get(key)
    if asked and asked not in known:
        words = f"There is no run {asked} here, as the link has it: this is {first}."
        st.warning(in_markdown(words), icon=":material/link_off:")
    return known.get(st.sidebar.selectbox(label, names, key=key, bind="query-params"))


def choose_row(names: Sequence[str]) -> None:
    """Take the run whose row was ticked in the list of runs."""
    rows = st.session_state["chosen_row"]["selection"]["rows"]
    if rows and rows[0] < len(names):
        st.session_state["run"] = names[rows[0]]
        st.session_state["row_was_chosen"] = True


def _is_recording(listing: Listing) -> bool:
    return listing.run is not None and not listing.run.meta.get("training")


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
    return known.get(st.session_state.get("run", ""), next(iter(known.values())))


def logged() -> dict[str, Listing]:
    """The runs that kept a training log, by name."""
    return {
        run_name(item): item for item in listings() if item.run and (item.folder / FILE).is_file()
    }


def recorded() -> list[Listing]:
    """The runs that hold statistics."""
    return [item for item in listings() if item.run and item.run.parts()]


def pair() -> tuple[int, int]:
    """Positions of two recorded runs to compare: the chosen one and its like, if there is one."""
    runs = recorded()
    models = [model_of(item) for item in runs]
    names = [run_name(item) for item in runs]
    chosen = st.session_state.get("run")
    first = names.index(chosen) if chosen in names else 0
    others = [i for i in range(len(runs)) if i != first]
    like = [i for i in others if models[i] == models[first]]
    return first, (like or others or [0])[0]


def model_of(listing: Listing) -> str:
    """The type of a run's model, as far as its meta.json says."""
    model = listing.run.meta.get("model") if listing.run else None
    return str(model.get("type") or "") if isinstance(model, dict) else ""


def choose_recorded(label: str, key: str, index: int, *, where: Any) -> Listing:
    """A select box of the runs that hold statistics."""
    known = {run_name(item): item for item in recorded()}
    name = where.selectbox(label, list(known), index=index, key=key, bind="query-params")
    return known[name]


# -- caches ----------------------------------------------------------------------------------------


def stamp(run: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a run does: names, times and sizes of its files."""
    made = ("plan.json", "profile.json", "sensitivity.json", "search.json")
    paths = [run / META, run / FILE, *(run / name for name in made)]
    for parts in ("stats/*.parquet", "operations/*.parquet", "modules/*.parquet", "ranks/*.json"):
        paths += sorted(run.glob(parts))
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path.relative_to(run)), status.st_mtime_ns, status.st_size))
    return tuple(found)


@st.cache_resource(max_entries=3, show_spinner="Reading the run …")
def _analysis(run: str, target: str, moment: str) -> Analysis:
    return analyze(run, target=target)


def analysis(listing: Listing, target: str = FP16.name) -> Analysis:
    """A run's analysis, computed once for each state of its files."""
    run = opened(listing)
    if run.meta.get("training") and not run.parts():
        message = (
            f"{run_name(listing)} is a training by a plan, whose gradients were not recorded: choose "
            "the recording it rests on, or see its Training view"
        )
        raise RunNotFound(message)
    return _analysis(str(listing.folder), target, str(stamp(listing.folder)))


@st.cache_resource(max_entries=16, show_spinner=False)
def _log(run: str, moment: str) -> TrainingLog:
    return read_log(run)


def log(listing: Listing) -> TrainingLog:
    """A run's training log, read once for each state of its files."""
    return _log(str(listing.folder), str(stamp(listing.folder)))


@st.cache_resource(max_entries=12, show_spinner=False)
def _layers(run: str, kind: Kind, moment: str, _analysis: Analysis) -> Layers:
    return in_model_order(_analysis.layers.of_kind(kind), _analysis.run.modules())


def layers(listing: Listing, kind: Kind) -> Layers:
    """A run's layers of one kind, in the model's order."""
    return _layers(
        str(listing.folder), kind, str(stamp(listing.folder)), _analysis=analysis(listing)
    )


@st.cache_resource(max_entries=40, show_spinner=False)
def _once(run: str, moment: str, key: tuple[object, ...], _make: Callable[[], Any]) -> Any:
    return _make()


def once(listing: Listing, *key: object, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, made once for each key and each state of the run's files."""
    return _once(str(listing.folder), str(stamp(listing.folder)), key, make)


# -- showing ---------------------------------------------------------------------------------------


def show(picture: Picture) -> None:
    """A figure with its caption, its receipt and its downloads."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(f"##### {in_markdown(picture.title)}")
        receipt = st.popover("Receipt", icon=":material/receipt_long:", type="tertiary")
    st.plotly_chart(
        picture.figure,
        key=f"figure-{picture.key}",
        config={
            "displaylogo": False,
            "toImageButtonOptions": {"format": "svg", "filename": picture.key},
            "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
        },
    )
    if picture.caption:
        st.caption(in_markdown(picture.caption))
    with receipt:
        st.caption("These numbers in plain pandas, from the run folder alone:")
        st.code(picture.receipt, language="python")
        left, right = st.columns(2)
        left.download_button(
            "Table (CSV)",
            data=lambda: csv_text(picture.frame),
            file_name=f"{picture.key}.csv",
            mime="text/csv",
            key=f"csv-{picture.key}",
            on_click="ignore",
        )
        right.download_button(
            "Figure (HTML)",
            data=lambda: picture.figure.to_html(include_plotlyjs=True),
            file_name=f"{picture.key}.html",
            mime="text/html",
            key=f"html-{picture.key}",
            on_click="ignore",
        )


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
    st.caption(describe(listing))


def describe(listing: Listing) -> str:
    """One line on a run: model, steps, state, when it was last written; Markdown-safe."""
    run = opened(listing)
    meta = run.meta
    words = [run_name(listing), model_of(listing)]
    if meta.get("steps_recorded") is not None:
        words.append(f"{meta['steps_recorded']} of {meta.get('steps_seen')} steps recorded")
    words.append(state_of(meta))
    return in_markdown(" · ".join(word for word in words if word))


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


def follow(listing: Listing) -> None:
    """Show the view anew whenever a live run has grown."""
    seen = stamp(listing.folder)

    @st.fragment(run_every=2)
    def watch() -> None:
        if stamp(listing.folder) != seen:
            st.rerun()

    watch()


def choose_layer(names: Sequence[str], label: str = "Layer", key: str = "layer") -> str | None:
    """A select box of layers that is searched by typing; None for all of them."""
    known = {ALL: None, **{layer_name(name): name for name in names}}
    return known[st.selectbox(label, list(known), key=key, bind="query-params")]


def ways_on() -> None:
    """Where to go from a training by a plan, which has no gradients to look at."""
    runs = {run_name(item): item for item in listings()}
    name = st.session_state.get("run", "")
    run = runs[name].run if name in runs else None
    if run is None or not run.meta.get("training"):
        return
    root = family(name, runs)[0]
    with st.container(horizontal=True):
        if root != name and _is_recording(runs[root]):
            link("verdict", f"The recording {in_markdown(root)}", run=root)
        link("training", "Its training")


def link(page: str, label: str, **query: str) -> None:
    """A link to another view of the same run."""
    run = st.session_state.get("run")
    values = {**({"run": run} if run else {}), **query}
    st.page_link(
        f"views/{page}.py", label=label, icon=":material/arrow_forward:", query_params=values
    )
