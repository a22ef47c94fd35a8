"""What the pages share on screen: choosing runs and layers, pictures, tables, links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import run_cache
import run_folder
import streamlit as st
from csv_tables import csv_text
from layer_links import take_word, unless_set
from run_list import kind_of, root_of
from stamps import stamp_of_run

from mpdiag.analysis.verdict.evidence import failure_of
from mpdiag.display.explanations import command_for, explanation
from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    in_markdown,
    layer_name,
    magnitude,
    percent,
    sentence,
)
from mpdiag.errors import MpdiagError, RunNotFound
from mpdiag.numerics.formats import FORMATS, TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import pandas as pd

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.analysis.findings import Finding
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.reports.picture import Picture
    from mpdiag.runs.run import Listing, Run
    from mpdiag.runs.schema import Kind

ALL = "(all together)"
# Streamlit's own block of code loads 1.6 MB of JavaScript that colours programs, and runs it before the
# figures of the page are drawn.
_command = st.components.v2.component(
    "mpdiag_command_block",
    html='<div class="command"><pre><code></code></pre><button>Copy</button></div>',
    css=Path(__file__).with_name("command_block.css").read_text(encoding="utf-8"),
    js=Path(__file__).with_name("command_block.js").read_text(encoding="utf-8"),
)

_BUTTONS = (
    '<div><button name="svg">Figure (SVG)</button><button name="png">Figure (PNG)</button></div>'
)
_files = st.components.v2.component(
    "mpdiag_figure_files",
    html=_BUTTONS,
    css=Path(__file__).with_name("figure_files.css").read_text(encoding="utf-8"),
    js=Path(__file__).with_name("figure_files.js").read_text(encoding="utf-8"),
)
CONFIG = {"displayModeBar": False, "displaylogo": False}
"""No toolbar: it would lie over a phone's figure. A double click undoes a zoom; files have buttons."""


def choose_run(place: Any, label: str = "Run", key: str = "run") -> Listing | None:
    """A select box of the folder's runs, remembered in the address."""
    known = {run_folder.run_name(item): item for item in run_folder.listings()}
    if not known:
        return None
    first = run_folder.run_name(run_folder.first(list(known.values())))
    names = [first, *(name for name in known if name != first)]
    unless_known("run", key, known, f"which is not in this folder. Showing {first}.")
    return known.get(place.selectbox(label, names, key=key, bind="query-params"))


def unless_known(what: str, key: str, known: Collection[str], words: str) -> None:
    """Say that the address asks for something that there is not.

    Args:
        what: What it is called.
        key: Its name in the address.
        known: What there is.
        words: The end of the sentence.
    """
    asked = st.query_params.get(key)
    if asked and asked not in known:
        told = in_markdown(f"This link points to {what} {asked}, {words}")
        st.warning(told, icon=":material/link_off:")


def sidebar() -> Listing | None:
    """The run that the pages show, the switch for the sample runs, and where the runs lie."""
    place = st.sidebar.container()
    if run_folder.samples() is not None:  # before the list of runs, which it decides
        st.sidebar.toggle(
            "Show the sample runs, too",
            key=run_folder.SAMPLES,
            bind="query-params",
            help="Runs that come with mpdiag. They are listed after your own.",
        )
    st.sidebar.caption(in_markdown(f"Runs in {run_folder.folder()}"))
    return choose_run(place)


def choose_kind(place: Any, kinds: Sequence[Kind]) -> Kind:
    """A select box of kinds of tensors."""
    kind: Kind = place.selectbox(
        "Tensors", kinds, format_func=KIND_NAMES.get, key="kind", bind="query-params"
    )
    return kind


def choose_format(place: Any, usual: FloatFormat) -> FloatFormat:
    """The formats to train in beside each other; the usual one, unless the session holds another."""
    take_word("format", [fmt.name for fmt in TARGETS])
    name = place.segmented_control(
        "Format",
        [fmt.name for fmt in TARGETS],
        **unless_set("format", default=usual.name),
        required=True,
        format_func=lambda name: FORMATS[name].label.replace("FP8 ", ""),
        key="format",
        bind="query-params",
    )
    return FORMATS[name or usual.name]


def complain(error: MpdiagError, listing: Listing | None) -> None:
    """Say why a page shows nothing: as a note where that is as it should be, else as an error."""
    words = in_markdown(str(error))
    if listing is None:
        normal = isinstance(error, RunNotFound)
    else:
        empty = listing.run is not None and not listing.run.parts()
        normal = empty and (not run_folder.is_recording(listing) or run_folder.live(listing))
    show, icon = (st.info, "info") if normal else (st.error, "error")
    show(words, icon=f":material/{icon}:")


def choose_layer(names: Sequence[str], label: str = "Layer", key: str = "layer") -> str | None:
    """A select box of layers that is searched by typing; None for all of them."""
    known = {ALL: None, **{layer_name(name): name for name in names}}
    return known[st.selectbox(label, list(known), key=key, bind="query-params")]


def show(picture: Picture, *, selectable: bool = False) -> Any:
    """Show a figure with its caption, its receipt and its downloads.

    Args:
        picture: The figure.
        selectable: Whether the page runs again when a point or a bar of it is clicked.

    Returns:
        The points that are selected, as Streamlit reports them; an empty list without ``selectable``.
    """
    key = f"figure-{picture.key}"
    alt = f"{picture.title}. {picture.caption}"
    options: dict[str, Any] = {"key": key, "config": CONFIG, "alt": alt}
    if selectable:
        options |= {"on_select": "rerun", "selection_mode": "points"}
    with st.container(gap=4):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.header(in_markdown(picture.title), anchor=False, width="content")
            receipt = st.popover("Receipt", icon=":material/receipt_long:", type="tertiary")
        event: Any = st.plotly_chart(picture.figure, **options)
        if picture.caption:
            st.caption(in_markdown(picture.caption))
    with receipt:
        _downloads(picture, key)
    return event["selection"]["points"] if selectable else []


def _downloads(picture: Picture, key: str) -> None:
    st.caption("These numbers in plain pandas, from the run folder alone:")
    st.code(picture.receipt, language="python", wrap_lines=True)
    left, right = st.columns(2)
    left.download_button(
        "Table (CSV)",
        data=lambda: csv_text(picture.frame),
        file_name=f"{picture.key}.csv",
        mime="text/csv",
        key=f"csv-{picture.key}",
        on_click="ignore",
        width="stretch",
    )
    right.download_button(
        "Figure (HTML)",
        data=lambda: picture.figure.to_html(include_plotlyjs=True),
        file_name=f"{picture.key}.html",
        mime="text/html",
        key=f"html-{picture.key}",
        on_click="ignore",
        width="stretch",
    )
    _files(
        key=f"files-{picture.key}",
        data={
            "figure": key,
            "file": picture.key,
            "title": picture.title,
            "caption": picture.caption,
        },
    )


def explain(code: str) -> None:
    """What a finding means, folded away below it; nothing for a code that no finding has.

    Its example is of another run, whose figures would stand among this one's.
    """
    page = explanation(code)
    if page is None:
        return
    with st.expander(f"What {code} means", icon=":material/help:"):
        meaning_of(code)


def remarks(found: Iterable[tuple[str, bool]]) -> None:
    """What trainings noted: warnings in boxes, all else in small print."""
    for words, warns in found:
        if warns:
            st.warning(in_markdown(words), icon=":material/warning:")
        else:
            st.caption(in_markdown(words))


def verdict_box(analysis: Analysis, listing: Listing) -> None:
    """The verdict, in a box whose colour repeats it; of a live run ``follow`` has said it."""
    if run_folder.live(listing):
        return
    worst = {finding.severity for finding in analysis.findings}
    bad = "error" in worst or analysis.verdict.level == "cannot"
    sure = st.success if analysis.verdict.level == "shown" else st.info
    box = st.error if bad else st.warning if analysis.plan.loss_scale.needed else sure
    box(f"**{in_markdown(analysis.verdict.text)}**", icon=":material/gavel:")


def findings(found: Sequence[Finding], most: int, page: str, label: str) -> None:
    """The findings that weigh most, each folded to a line; unfolded it has the fix and the meaning.

    Args:
        found: The findings, those that weigh most first.
        most: How many of them are shown.
        page: The page that has all of them.
        label: What the link to it is called.
    """
    with st.container(gap=6, key="findings"):
        more = len(found) - most
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.header("Findings", anchor=False, width="content")
            link(page, f"{label}, and {counted(more, 'more finding')}" if more > 0 else label)
        if not found:
            st.markdown("No findings.")
        folded(found[:most])


def folded(found: Sequence[Finding]) -> None:
    """Findings, each folded to a line; unfolded it has the fix and the meaning."""
    for finding in found:
        icon = {"error": "error", "warning": "warning"}.get(finding.severity, "info")
        with st.expander(in_markdown(sentence(finding.message)), icon=f":material/{icon}:"):
            if finding.fix:
                st.markdown(f"→ {in_markdown(sentence(finding.fix))}")
            meaning_of(finding.code)


def meaning_of(code: str) -> None:
    """The sections of a finding's page, within its fold."""
    page = explanation(code)
    if page is None:
        return
    for title in ("What it means", "How it was computed", "How to fix it"):
        st.markdown(f"**{title}**\n\n{page.sections[title]}")
    st.caption(in_markdown(command_for(code)))


def table(frame: pd.DataFrame, labels: Mapping[str, str] | None = None) -> None:
    """A table: the model by its name, shares in percent, what is missing left blank.

    Args:
        frame: The table.
        labels: What columns are called on screen; others by their names in words.
    """
    shown = blank(frame)
    for name in ("layer", "parameter", "name"):
        if name in shown:
            shown[name] = shown[name].map(lambda value: layer_name(str(value)))
    columns = {c: _column(c, shown[c], (labels or {}).get(c, _label(c))) for c in shown}
    formats: Any = {c: words for c in shown if (words := _words(c, shown[c])) is not None}
    written: Any = shown.style.format(formats, na_rep="") if formats else shown
    st.dataframe(written, hide_index=True, column_config=columns, placeholder="")


def blank(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with blanks for what is missing, which would be shown as "None"."""
    shown = frame.copy()
    for name in shown.columns[shown.isna().any()]:
        if shown[name].isna().all() or shown[name].dtype == object:
            shown[name] = shown[name].astype(object).where(shown[name].notna(), "").map(str)
    for name in shown:
        if shown[name].dtype == object and any(isinstance(v, list) for v in shown[name]):
            shown[name] = shown[name].map(_listed)
    return shown


def _listed(value: object) -> object:
    """A list in words: a column that has lists and other values cannot be sent."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _label(name: str) -> str:
    """A column's name in words."""
    return f"{name[:-3].replace('_', ' ')} (µs)" if name.endswith("_us") else name.replace("_", " ")


EXACT = 1e5
"""Numbers from which rounding to a few digits would mislead."""
_SHARES = ("share", "underflow_a", "underflow_b", "overflow_a", "overflow_b", "beyond_2048")
_MAGNITUDES = ("absmax", "largest")
_ERRORS = ("relative", "estimate")
SMALL = 1e-3
"""Magnitudes below which a column is written in powers of two: nobody counts zeros."""


def _words(name: str, values: pd.Series[Any]) -> Callable[[float], str] | None:
    """How numbers are written that no format of a column writes as people do; None for others."""
    if values.dtype.kind != "f":
        return None
    if name.startswith(_ERRORS) or " error" in name:
        return relative_error
    if name.endswith(_SHARES):
        return percent
    small = (values > 0) & (values < SMALL)
    return magnitude if name.startswith(_MAGNITUDES) and small.any() else None


def relative_error(value: float) -> str:
    """A relative error in percent; one of more than 1 in times, an infinite one by its sign."""
    if not value <= 1:
        return "∞" if value == float("inf") else f"{value:,.3g} ×"
    return percent(value)


def _column(name: str, values: pd.Series[Any], label: str) -> Any:
    """How a column is shown: its name in words, its numbers as they are read."""
    if values.dtype.kind not in "iuf" or _words(name, values) is not None:
        return label
    if values.dtype.kind == "f" and name.startswith(_MAGNITUDES):
        return st.column_config.NumberColumn(label, format="%.3g")
    if values.dtype.kind == "f":
        known = values.dropna()
        if len(known) and (known >= 1000).any() and (known == known.round()).all():
            return st.column_config.NumberColumn(label, format="localized")  # 131,072
        large = bool((values.abs() >= EXACT).any())  # a scale of 131072 keeps all its digits
        return st.column_config.NumberColumn(label, format="%.9g" if large else "%.5g")
    return st.column_config.NumberColumn(label, format="localized")


def heading(title: str, listing: Listing) -> None:
    """A view's title and the run it speaks of; the run's name may be the title."""
    own = title == run_folder.run_name(listing)
    title_line(in_markdown(title), run_folder.describe(listing, named=not own))


def title_line(title: str, words: str) -> None:
    """A page's title and a line on it beside it; Markdown."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="heading"):
        st.title(title, anchor=False, width="content")
        st.caption(words, width="content")


def follow(listing: Listing) -> None:
    """Say how far a live run is, and show the view anew whenever it has grown."""
    if listing.run is not None:
        words = progress_words(listing, listing.run)
        st.info(in_markdown(words), icon=":material/sensors:")
    seen = stamp_of_run(listing.folder)

    @st.fragment(run_every=2)
    def watch() -> None:
        if stamp_of_run(listing.folder) != seen:
            st.rerun()

    watch()


def progress_words(listing: Listing, run: Run) -> str:
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
    return f"{text} Later steps may change this. So far: {verdict}"


def ways_on() -> None:
    """Where to go from a training by a plan, which has no gradients to look at."""
    runs = {run_folder.run_name(item): item for item in run_folder.listings()}
    name = st.session_state.get("run", "")
    kind = kind_of(runs[name]) if name in runs else ""
    if kind not in ("profile", "training"):
        return
    root = root_of(name)
    with st.container(horizontal=True):
        link("overview", "Overview")
        if kind == "profile":
            link("tensor_cores", "Tensor Cores")
        else:
            if root in runs and run_folder.is_recording(runs[root]):
                open_run(f"The recording {in_markdown(root)}", root)
            link("training", "Training")


def link(page: str, label: str, **query: str) -> None:
    """A link to another view of the same run."""
    run = st.session_state.get("run")
    # What the address holds for the sidebar goes along by itself, and would stand there twice.
    own = {"run": run} if run and "run" not in st.query_params else {}
    st.page_link(
        f"views/{page}.py",
        label=label,
        icon=":material/arrow_forward:",
        query_params={**own, **query},
    )


def open_run(label: str, run: str) -> None:
    """A button that shows another run in this view; a link cannot: the address keeps this one."""
    st.button(
        label,
        key=f"open-{run}",
        icon=":material/arrow_forward:",
        type="tertiary",
        on_click=lambda: st.session_state.update(run=run),
    )


def command_block(command: str, key: str) -> None:
    """Show a command with a button that copies it.

    Args:
        command: As it is typed.
        key: Its own among the commands of the page.
    """
    _command(key=f"command-{key}", data={"command": command})
