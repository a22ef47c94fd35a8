"""The runs of the folder: a click opens one; runs that are being written refresh by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import run_cache
import run_folder
import run_list as views
import streamlit as st
import widgets

from mpdiag.display.wording import counted, in_markdown
from mpdiag.runs.training_log import FINAL_LOSS, FINAL_WORDS

if TYPE_CHECKING:
    from mpdiag.runs.run import Listing

OPENS = "row_to_open"  # whether a row was clicked whose run the page is to open

found = run_folder.listings()
own = sum(not run_folder.is_sample(item) for item in found)


def head(text: str, kinds: list[views.Kind]) -> None:
    """How many runs there are, how many of them the filters leave, and what a click does."""
    where = f"{counted(own, 'run')} in {run_folder.folder()}"
    bundled = len(found) - own
    more = f", {counted(bundled, 'sample run')} below" if bundled else ""
    some = sum(kept(views.runs_frame(listed(found)), text, kinds))
    shown = f", {some} shown" if some < len(found) else ""
    widgets.title_line("Runs", in_markdown(f"{where}{more}{shown}. Click a row to open its run."))


def filters() -> tuple[str, list[views.Kind], bool]:
    """The text to look for, the kinds to show, and whether trainings follow their recording."""
    first, second, third = st.columns([2, 3, 1.4], vertical_alignment="bottom")
    text = first.text_input(
        "Filter", key="filter", placeholder="name, model, verdict …", bind="query-params"
    )
    there = {views.kind_of(item) for item in found}
    options = [kind for kind in views.KINDS if kind in there]
    kinds = second.pills(
        "Kind",
        options,
        selection_mode="multi",
        format_func=lambda kind: views.KINDS[kind],
        key="kinds",
        bind="query-params",
    )
    group = third.toggle("Group with recording", value=True, key="group", bind="query-params")
    return text or "", kinds or options, group


def arranged(frame: pd.DataFrame, samples: list[bool], *, group: bool) -> pd.DataFrame:
    """The rows in their order: one's own, then sample runs; trainings below their recording."""
    parts = []
    for wanted in (False, True):
        part = frame[[sample is wanted for sample in samples]]
        if group and len(part):
            part = part.iloc[views.grouped(list(part["run"]))]
        parts.append(part)
    return pd.concat(parts)


def choose(names: list[str]) -> None:
    """Take the run whose row was clicked; the page opens it.

    A grid that is given the focus, as by a click on a heading, selects its first cell by itself. So
    the first column opens nothing: it is the narrow one that sets trainings off.
    """
    selection = st.session_state["chosen_row"]["selection"]
    rows = [row for row, name in selection["cells"] if name != views.MARK]
    if rows and rows[0] < len(names):
        st.session_state["run"] = names[rows[0]]
        st.session_state[OPENS] = True


def wide(values: pd.Series[Any], least: int) -> int:
    """Pixels that the longest of some words takes: no cell is cut."""
    return max(least, int(20 + 6.2 * values.astype(str).str.len().max()))


def columns(frame: pd.DataFrame, badges: list[views.Badge]) -> dict[str, Any]:
    """How each column is shown."""
    column = st.column_config
    colours = {badge.words: views.TONES[badge.tone] for badge in badges}
    return {
        views.MARK: column.TextColumn(views.BELOW, pinned=True, width=34),
        "run": column.TextColumn("run", pinned=True, width=wide(frame["run"], 120)),
        "verdict": column.MultiselectColumn(
            "verdict",
            options=list(colours),
            color=list(colours.values()),
            width=156,
            help="The verdict of the plan in the run's folder. For a training: how it ended, and what "
            "mpdiag compare answered.",
        ),
        "losses": column.LineChartColumn("loss", width=72, help="Medians over the training."),
        "final_loss": column.NumberColumn(FINAL_LOSS, format="%.4g", width=80, help=FINAL_WORDS),
        "metric": column.TextColumn("last metric", width=wide(frame["metric"], 110)),
        "skipped": column.NumberColumn("skipped", format="localized", width=64),
        "format": column.TextColumn("format, level", width=128),
        "steps": column.NumberColumn("steps", format="localized", width=70),
        "recorded": column.NumberColumn("recorded", format="localized", width=75),
        "model": column.TextColumn("model", width=120),
        "device": column.TextColumn("device", width=60),
        "size": column.NumberColumn("size", format="bytes", width=70),
        "created": column.DatetimeColumn("age", format="distance", width=104),
        "state": column.TextColumn("state", width=180),
    }


def listed(items: list[Listing]) -> list[views.Listed]:
    """What is known of each run."""
    return [
        views.Listed(
            item,
            run_folder.run_name(item),
            run_cache.glance(item),
            run_folder.state_of(item.run.meta) if item.run else "",
            run_folder.live(item),
        )
        for item in items
    ]


def answers(items: list[Listing]) -> dict[str, str]:
    """What ``mpdiag compare`` says of each training whose recording lies beside it."""
    recordings = {item.folder: item for item in items if run_folder.is_recording(item)}
    found = {}
    for item in items:
        root = item.folder.with_name(views.root_of(item.folder.name))
        if views.kind_of(item) == "training" and root in recordings:
            found[run_folder.run_name(item)] = run_cache.answer(recordings[root], item)
    return found


def kept(frame: pd.DataFrame, text: str, kinds: list[views.Kind]) -> list[bool]:
    """Which rows the filters leave."""
    return [row["kind"] in kinds and views.matches(row, text) for row in frame.to_dict("records")]


def shown(frame: pd.DataFrame, *, group: bool) -> pd.DataFrame:
    """The table as it is drawn: no column without a value, and blanks for what is missing."""
    full = [
        name
        for name in views.COLUMNS[:-1]
        if name in ("run", "verdict") or frame[name].astype(str).str.strip("[]").any()
    ]
    table = frame[full].copy()
    for name in ("steps", "recorded", "skipped", "final_loss"):
        if name in table:
            table[name] = table[name].astype("Float64")
    table["format"] = frame["format"].where(frame["format"] != "", frame["kind"])
    table["verdict"] = [[words] for words in table["verdict"]]
    table.insert(0, views.MARK, views.marks(list(table["run"])) if group else "")
    return table


@st.fragment(run_every=2 if any(run_folder.live(item) for item in found) else None)
def table(text: str, kinds: list[views.Kind], group: bool) -> None:
    """The list, read anew each time."""
    items = run_folder.listings()
    runs = listed(items)
    badges = views.badges(runs, answers(items))
    frame = views.runs_frame(runs, badges)
    keep = kept(frame, text, kinds)
    samples = [run_folder.is_sample(item) for item, one in zip(items, keep, strict=True) if one]
    chosen = arranged(frame[keep], samples, group=group)
    if chosen.empty:
        st.info(
            in_markdown(
                f"No run here matches “{text}”." if text else "There is no run of that kind."
            )
        )
        return
    names = list(chosen["run"])
    st.dataframe(
        shown(chosen, group=group),
        hide_index=True,
        height=min(35 * (len(chosen) + 1) + 3, 640),
        key="chosen_row",
        on_select=lambda: choose(names),
        selection_mode="single-cell",
        column_config=columns(chosen, badges),
        placeholder="",
        alt="One row per run of the folder. The select box in the sidebar opens them, too.",
    )
    if st.session_state.pop(OPENS, False):
        # The select box in the sidebar keeps the run in the link. The filter goes with this page; an
        # address without query_params may not be left while a filter is bound to it.
        st.switch_page("views/overview.py", query_params={})


if found:
    above = st.container()
    wanted = filters()
    with above:
        head(*wanted[:2])
    table(*wanted)
    for item in found:
        if item.problem:
            st.warning(in_markdown(item.problem), icon=":material/warning:")
else:
    st.title("Runs", anchor=False)
    st.info(
        "No runs here yet. Record one with `mpdiag demo`, or attach `mpdiag.record` to your training."
    )
