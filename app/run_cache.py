"""What is computed once for each state of a run's files: analysis, logs, tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import run_folder
import streamlit as st
from glance import Glance, PlanGlance, read_glance
from stamps import stamp_of_run

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.analysis.comparison.compare import compare_groups
from mpdiag.analysis.comparison.groups import SeedGroup, read_group
from mpdiag.analysis.comparison.models import KnownModel
from mpdiag.errors import InputError, MpdiagError, RunNotFound
from mpdiag.numerics.formats import FP16
from mpdiag.reports.contents import RunContents, read_contents
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.runs.results import read_profile
from mpdiag.runs.run import META
from mpdiag.runs.training_log import TrainingLog, read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mpdiag.analysis.layers import Layers
    from mpdiag.runs.run import Listing
    from mpdiag.runs.schema import Kind

Made = TypeVar("Made")


@st.cache_resource(max_entries=3, show_spinner="Reading the run …")
def _analysis(run: str, target: str, moment: str) -> Analysis:
    return analyze(run, target=target)


def analysis(listing: Listing, target: str = FP16.name) -> Analysis:
    """A run's analysis, computed once for each state of its files."""
    run = run_folder.opened(listing)
    if run.meta.get("training") and not run.parts():
        message = (
            f"{run_folder.run_name(listing)} is a training by a plan, without recorded gradients: "
            "select the recording that its plan was made from, or open the Training page"
        )
        raise RunNotFound(message)
    key = (str(listing.folder), str(stamp_of_run(listing.folder)))
    found = _analysis(key[0], target, key[1])
    if target == FP16.name:
        _plans_made()[key] = PlanGlance.of(found.plan)
    return found


@st.cache_resource(max_entries=1024, show_spinner=False)
def _glance(run: str, moment: str, _listing: Listing) -> Glance:
    return read_glance(_listing.folder)


@st.cache_resource(show_spinner=False)
def _plans_made() -> dict[tuple[str, str], PlanGlance]:
    """What analyses of this dashboard decided, by run and state of its files."""
    return {}


def glance(listing: Listing) -> Glance:
    """What a run's files say, and what this dashboard found if it has analyzed the run already."""
    key = (str(listing.folder), str(stamp_of_run(listing.folder)))
    found = _glance(*key, listing)
    if found.plan is None and key in _plans_made():
        return replace(found, plan=_plans_made()[key])
    return found


@st.cache_resource(max_entries=68, show_spinner=False)
def _once(run: str, moment: str, key: tuple[object, ...], _make: Callable[[], Any]) -> Any:
    return _make()


def once(listing: Listing, *key: object, make: Callable[[], Made]) -> Made:
    """What ``make`` returns, made once for each key and each state of the run's files."""
    found: Made = _once(str(listing.folder), str(stamp_of_run(listing.folder)), key, make)
    return found


def log(listing: Listing) -> TrainingLog:
    """A run's training log."""
    return once(listing, "log", make=lambda: read_log(listing.folder))


def layers(listing: Listing, kind: Kind) -> Layers:
    """A run's layers of one kind, in the model's order."""
    of_run = analysis(listing)
    return once(
        listing,
        "layers",
        kind,
        make=lambda: in_model_order(of_run.layers.of_kind(kind), of_run.run.modules()),
    )


def late_layers(listing: Listing) -> Layers:
    """Activation gradients of the part of the training that decides, in the model's order."""
    of_run = analysis(listing)
    return once(
        listing,
        "late layers",
        make=lambda: in_model_order(of_run.loss_scale.late, of_run.run.modules()),
    )


@st.cache_resource(max_entries=512, show_spinner=False)
def _model(run: str, moment: str, _listing: Listing) -> KnownModel:
    try:
        return KnownModel.of_run(run_folder.opened(_listing))
    except InputError:
        return KnownModel()


def model(listing: Listing) -> KnownModel:
    """What a run knows of its model; nothing, if its files are damaged."""
    return _model(str(listing.folder), str(stamp_of_run(listing.folder)), listing)


@st.cache_resource(max_entries=64, show_spinner="Reading the trainings …")
def _group(place: str, moment: str) -> SeedGroup | str:
    try:
        return read_group(place)
    except MpdiagError as error:
        return str(error)


def group(place: Path) -> SeedGroup | str:
    """Trainings to compare, read once for each state of their files, or why they cannot be read.

    Args:
        place: A run, or a folder of them.
    """
    runs = [place] if (place / META).is_file() else sorted(place.glob(f"*/{META}"))
    moment = [stamp_of_run(run if run.is_dir() else run.parent) for run in runs]
    return _group(str(place), str(moment))


def answer(recording: Listing, training: Listing) -> str:
    """What ``mpdiag compare`` would say of a training beside its recording; "" where it cannot."""

    def judged() -> str:
        a, b = group(recording.folder), group(training.folder)
        if isinstance(a, str) or isinstance(b, str):
            return ""
        try:
            return compare_groups(a, b).answer
        except MpdiagError:
            return ""

    moment = str(stamp_of_run(training.folder))
    return once(recording, "answer", str(training.folder), moment, make=judged)


def contents(listing: Listing) -> RunContents:
    """A run's analysis with what else its folder holds."""
    of_run = analysis(listing)
    return once(listing, "contents", make=lambda: read_contents(of_run))


def profile(listing: Listing) -> Mapping[str, Any]:
    """A run's ``profile.json``.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    return read_profile(run_folder.opened(listing).folder)
