"""What can be compared in this folder: runs and folders of seeds, and which belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import run_cache
import run_folder
import streamlit as st

from mpdiag.analysis.comparison.compare import Comparison, compare_groups
from mpdiag.analysis.comparison.groups import SeedGroup, read_group
from mpdiag.analysis.comparison.models import KnownModel, relate_models, same_model
from mpdiag.errors import MpdiagError
from mpdiag.reports.views.compare import Side, trained_in
from mpdiag.reports.views.training import family
from mpdiag.runs.run import META, Listing, list_runs, open_run
from mpdiag.runs.stamps import stamp_of_run
from mpdiag.runs.training_log import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def known() -> dict[str, Path]:
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


def related(name: str, places: Mapping[str, Path]) -> list[str]:
    """What belongs with a run: trainings by its plan, then other runs of its model."""
    kin = [other for other in family(name, places) if other != name]
    return kin or [
        other
        for other in places
        if other != name and same_model(_model(places[other]), _model(places[name]))
    ]


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
    groups = [_group(place) for place in (a, b)]
    models = [
        _model(place) if group is None or isinstance(group, str) else group.model
        for place, group in zip((a, b), groups, strict=True)
    ]
    relation = relate_models(*models)
    return relation.words if relation is not None and relation.different else ""


@st.cache_resource(max_entries=64, show_spinner="Reading the trainings …")
def _read(place: str, moment: str) -> SeedGroup | str:
    try:
        return read_group(place)
    except MpdiagError as error:
        return str(error)


def _group(place: Path) -> SeedGroup | str:
    """A side's trainings, read once for each state of its files, or why they cannot be read."""
    runs = [place] if (place / META).is_file() else sorted(place.glob(f"*/{META}"))
    moment = [stamp_of_run(run if run.is_dir() else run.parent) for run in runs]
    return _read(str(place), str(moment))


def side(name: str, place: Path) -> Side | None:
    """One side with the words on how it was trained; None where it has no trainings to compare."""
    group = _group(place)
    if isinstance(group, str):
        return None
    one = [open_run(place)] if (place / META).is_file() else [i.run for i in list_runs(place)]
    words = list(dict.fromkeys(trained_in(run.meta) for run in one if run is not None))
    return Side(name, " / ".join(words), group)


def comparison(a: str, b: str, places: Mapping[str, Path]) -> Comparison | str:
    """What ``mpdiag compare A B`` says, or the sentence that says why it cannot."""
    groups = [_group(places[name]) for name in (a, b)]
    for group in groups:
        if isinstance(group, str):
            return group
    try:
        return compare_groups(*(g for g in groups if isinstance(g, SeedGroup)))
    except MpdiagError as error:
        return str(error)
