"""Trainings side by side: losses, metrics with their intervals, and how far layers moved.

What can be compared in this folder is runs and folders of seeds; those that belong together come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import run_cache
import run_folder
import streamlit as st
import widgets
from comparison import (
    Side,
    apart,
    comparison_frame,
    intervals,
    metric_sentence,
    remarks,
    side_losses,
    standing_frame,
    trained_in,
)
from run_list import family
from run_overview import command_text

from mpdiag.analysis.comparison.compare import (
    Comparison,
    compare_groups,
    refuse_unused_precision,
)
from mpdiag.analysis.comparison.comparison_findings import Tone, tone_of
from mpdiag.analysis.comparison.groups import SeedGroup
from mpdiag.analysis.comparison.models import KnownModel, relate_models
from mpdiag.display.wording import KIND_NAMES, in_markdown, sentence
from mpdiag.errors import MpdiagError
from mpdiag.reports.next_commands import compare_them
from mpdiag.runs.run import META, Listing, list_runs, open_run
from mpdiag.runs.training_log import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BADGES: Mapping[Tone, tuple[str, str]] = {
    "good": ("green", ":material/check_circle:"),
    "bad": ("red", ":material/cancel:"),
    "open": ("orange", ":material/help:"),
}


def all_places() -> dict[str, Path]:
    """Everything that can be compared, by name: runs, then folders of seeds."""
    found = {
        run_folder.run_name(item): item.folder
        for item in run_folder.listings()
        if item.run and (item.run.parts() or (item.folder / FILE).is_file())
    }
    root = run_folder.folder()
    if (root / META).is_file():
        return found
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name not in found and not (folder / META).exists() and _seeds(folder) > 1:
            found[folder.name] = folder
    return found


def _seeds(folder: Path) -> int:
    return sum((run.parent / FILE).is_file() for run in folder.glob(f"*/{META}"))


def default_pair(places: Mapping[str, Path]) -> tuple[str, str | None]:
    """The chosen run and one that belongs with it; a training comes second to its recording.

    Unrelated runs are not compared unasked: the second is None then.
    """
    names = list(places)
    chosen = st.session_state.get("run")
    name = chosen if chosen in places else names[0]
    root = family(name, names)[:1]
    if root and root[0] != name:
        return root[0], name
    return name, next(iter(related(name, places)), None)


def colour_places(shown: Mapping[str, Path]) -> dict[str, int]:
    """The place of each run of the page, by its name here, as on every other page."""
    by_folder = {item.folder: item for item in run_folder.listings()}
    items = {name: by_folder[path] for name, path in shown.items() if path in by_folder}
    return {
        name: run_folder.places(item)[item.folder.resolve().name] for name, item in items.items()
    }


def related(name: str, places: Mapping[str, Path]) -> list[str]:
    """What belongs with a run: trainings by its plan, then other runs of its model."""
    kin = [other for other in family(name, places) if other != name]
    return kin or [
        other
        for other in places
        if other != name and _same_model(_model(places[other]), _model(places[name]))
    ]


def _same_model(a: KnownModel, b: KnownModel) -> bool:
    """Whether two models are known to be one, or two versions of one."""
    found = relate_models(a, b)
    if found is not None:
        return not found.different
    return bool(a.type) and (a.type, a.parameters) == (b.type, b.parameters)


def _listing(place: Path) -> Listing | None:
    return next((item for item in run_folder.listings() if item.folder == place), None)


def _model(place: Path) -> KnownModel:
    """What is known of a run's model; of a folder of seeds, of the first."""
    first = place if (place / META).is_file() else next(place.glob(f"*/{META}")).parent
    listing = _listing(place)
    return run_cache.model(listing or Listing(first, open_run(first), None))


def recorded(name: str) -> Listing | None:
    """A run that holds statistics of gradients, by name."""
    runs = {run_folder.run_name(item): item for item in run_folder.recorded()}
    return runs.get(name)


def different_models(a: Path, b: Path) -> str:
    """How two runs' models differ, where they are two different ones; else ""."""
    groups = [run_cache.group(place) for place in (a, b)]
    models = [
        _model(place) if group is None or isinstance(group, str) else group.model
        for place, group in zip((a, b), groups, strict=True)
    ]
    relation = relate_models(*models)
    return relation.words if relation is not None and relation.different else ""


def side(name: str, place: Path) -> Side | None:
    """One side with the words on how it was trained; None where it has no trainings to compare."""
    group = run_cache.group(place)
    if isinstance(group, str):
        return None
    one = [open_run(place)] if (place / META).is_file() else [i.run for i in list_runs(place)]
    words = list(dict.fromkeys(trained_in(run.meta) for run in one if run is not None))
    return Side(name, " / ".join(words), group)


def comparison(a: str, b: str, places: Mapping[str, Path]) -> Comparison | str:
    """What ``mpdiag compare A B`` says, or the sentence that says why it cannot."""
    groups = [run_cache.group(places[name]) for name in (a, b)]
    for group in groups:
        if isinstance(group, str):
            return group
    try:
        return compare_groups(*(g for g in groups if isinstance(g, SeedGroup)))
    except MpdiagError as error:
        return str(error)


st.title("Compare", anchor=False)
known = all_places()
if len(known) < 2:
    st.info(
        "A comparison needs two runs. Record another seed, or train by the plan with `mpdiag train`."
    )
    st.stop()
names = list(known)
first, second = default_pair(known)
left, right = st.columns(2)
a = left.selectbox("Reference", names, index=names.index(first), key="a", bind="query-params")
b = right.selectbox(
    "Candidate",
    names,
    index=None if second is None else names.index(second),
    key="b",
    bind="query-params",
    placeholder="Choose a run",
)
if b is None:
    st.info(
        f"No other run here has the plan or the model of {in_markdown(a)}. To compare different "
        "models, choose both runs."
    )
    st.stop()
others = [name for name in names if name not in (a, b)]
if st.session_state.setdefault("beside_of", (a, b)) != (a, b):  # of another pair: begin again
    st.session_state["beside"] = [name for name in related(a, known) if name in others]
    st.session_state["beside_of"] = (a, b)
beside = st.multiselect(
    "Also show",
    others,
    default=[name for name in related(a, known) if name in others],
    key="beside",
    bind="query-params",
    placeholder="Other runs, for example in BF16",
)
for name in (a, b):  # as mpdiag compare does
    refuse_unused_precision(known[name])

different = different_models(known[a], known[b])
if different:  # said before anything else
    st.warning(in_markdown(f"These are two different models: {different}."))
sides = [one for name in (a, b, *beside) if (one := side(name, known[name])) is not None]
found = {each.name: comparison(a, each.name, known) for each in sides if each.name != a}
chosen = found.get(b)
if chosen is not None and not isinstance(chosen, str):
    for hindrance in chosen.hindrances:
        if hindrance.code != "different-models":
            words = (sentence(hindrance.message), f"→ {sentence(hindrance.fix)}")
            st.warning("  \n".join(map(in_markdown, words)))
    colour, icon = BADGES[tone_of(chosen.answer)]
    badge = f":{colour}-badge[{icon} {chosen.answer}]"
    st.header(f"{in_markdown(b)} against {in_markdown(a)}: {badge}", anchor=False)
    for metric in chosen.metrics:
        st.markdown(in_markdown(sentence(metric_sentence(metric))))
    upper, lower = st.columns([3, 2])
    with upper:
        paths = {each.name: str(known[each.name]) for each in sides}
        widgets.show(side_losses(sides, paths, chosen, colour_places(known)))
    with lower:
        widgets.show(intervals(str(known[a]), str(known[b]), chosen))
else:
    st.info(in_markdown(sentence(chosen or f"{a} has no training log to compare")))
if len(sides) > 1:
    tables = {name: one for name, one in found.items() if not isinstance(one, str)}
    widgets.table(standing_frame(sides, tables))
if chosen is not None and not isinstance(chosen, str):
    for words, fix in remarks(chosen):
        if words:
            st.warning("  \n".join(map(in_markdown, (words, *([f"→ {fix}"] if fix else [])))))
        else:
            st.info(in_markdown(fix), icon=":material/arrow_forward:")
    again = command_text(compare_them(known[a], known[b]))
    st.caption(f"Same as `mpdiag compare`. To use another margin: `{again} --margin NAME=VALUE`")

listings = [recorded(name) for name in (a, b)]
if None in listings:  # a training by a plan records no layers
    st.stop()
st.header("How far the layers moved", anchor=False)
kind = widgets.choose_kind(st, list(KIND_NAMES))
try:
    of_a, of_b = (run_cache.analysis(item) for item in listings if item is not None)
except MpdiagError as error:
    st.info(in_markdown(sentence(str(error))))
    st.stop()
layers = (of_a.layers, of_b.layers)
only_a, only_b = apart(layers[0].of_kind(kind), layers[1].of_kind(kind))
if only_a or only_b:
    st.caption(f"{only_a} layers are only in {in_markdown(a)}, {only_b} only in {in_markdown(b)}.")
widgets.table(comparison_frame(layers[0].of_kind(kind), layers[1].of_kind(kind)))
