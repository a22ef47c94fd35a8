"""One run on one screen; each kind of run has an overview of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plan_in_training
import run_cache
import run_folder
import run_overview as overview
import streamlit as st
import widgets
from run_list import family, format_of, kind_of, root_of
from stamps import stamp_of_run

from mpdiag.analysis.comparison.compare import unused_precision
from mpdiag.analysis.verdict.trained import followed_decisions
from mpdiag.display.wording import in_markdown, percent, sentence
from mpdiag.errors import MpdiagError
from mpdiag.numerics.formats import FP16
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan
from mpdiag.profiler import is_installed, part
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.reports.views.gradients.pictures import Gradients

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.reports.picture import Picture
    from mpdiag.runs.run import Listing
    from mpdiag.runs.training_log import TrainingLog

MOST_CURVES = 4


def recording(listing: Listing) -> None:
    """The verdict, how the trainings ended, the gradients before and after the scale, the rest."""
    analysis = run_cache.analysis(listing)
    widgets.verdict_box(analysis, listing)
    plan = stored_plan(listing)
    if plan is not None and plan.blocks is not None:
        words = f"The plan in its folder: {plan.verdict.text}"
        st.info(in_markdown(words), icon=":material/grid_on:")
    logs = logs_of_family(listing)
    tiles(listing, logs)
    worst = run_cache.once(listing, "before and after", make=lambda: pictures_of(analysis))
    if not worst:
        st.info("No gradients were recorded, so there is nothing to draw.")
    side_by_side(worst)
    left, right = st.columns(2, gap="medium")
    with left:
        for picture in curves_of(listing, logs, overview.CURVES):
            widgets.show(picture)
        coverage(analysis)
    with right:
        widgets.findings(analysis.findings, overview.FINDINGS, "verdict", "Why")
        commands(next_steps(listing, analysis, logs, plan))


def tiles(recording: Listing, logs: Mapping[str, TrainingLog]) -> None:
    """How a recording and its trainings ended, beside each other."""
    beside = run_folder.logged_beside(recording)
    trained, answers = {}, {}
    planned = by_its_plan(recording, logs)
    for name, log in logs.items():
        if kind_of(beside[name]) == "training":
            fmt = format_of(run_folder.opened(beside[name]).meta).partition(",")[0]
            trained[name] = overview.how_trained(fmt, log, by_the_plan=name in planned)
            answers[name] = run_cache.answer(recording, beside[name])
    found = overview.tiles(logs, trained, answers)
    if not found:
        return
    for cell, tile in zip(st.columns(len(found), gap="medium"), found, strict=True):
        cell.metric(
            in_markdown(tile.label),
            tile.value,
            tile.note,
            delta_color=tile.tone,
            delta_arrow="off",
            border=True,
            help=in_markdown(": ".join(filter(None, (tile.run, tile.meaning)))),
        )


def by_its_plan(recording: Listing, logs: Mapping[str, TrainingLog]) -> list[str]:
    """Which trainings follow the plan in a recording's folder; none where none can be read."""
    beside = run_folder.logged_beside(recording)
    plan = stored_plan(recording)
    if plan is None:
        return []
    decisions = plan.digest()
    return [n for n in logs if followed_decisions(run_folder.opened(beside[n])) == decisions]


def stored_plan(listing: Listing) -> PrecisionPlan | None:
    """The plan in a run's folder; None where none can be read."""
    try:
        return PrecisionPlan.load(listing.folder / PLAN)
    except (MpdiagError, OSError):
        return None


def coverage(analysis: Analysis) -> None:
    """What was recorded, in a line; unfolded, what was not, and what was not looked at."""
    seen, *missing = overview.coverage_words(analysis)
    with st.expander(in_markdown(seen), icon=":material/visibility:"):
        for words in missing or ("Nothing is known to be missing.",):
            st.markdown(in_markdown(words))


def pictures_of(analysis: Analysis) -> tuple[Picture, ...]:
    """The worst layer's gradients before and after the scale.

    They are weight gradients where those are all there is.
    """
    run, modules = str(analysis.run.folder), analysis.run.modules()
    late = in_model_order(analysis.loss_scale.late, modules)
    every_step = in_model_order(analysis.layers.of_kind("activation_grad"), modules)
    window = analysis.loss_scale.window
    shown = Gradients(run, "activation_grad", late, FP16, window, every_step)
    if not len(late):
        own = in_model_order(analysis.layers.of_kind("weight_grad"), modules)
        shown = Gradients(run, "weight_grad", own)
    return overview.worst_layer(shown, analysis.plan.loss_scale)


def side_by_side(pictures: Sequence[Picture]) -> None:
    """Pictures beside each other, from left to right; on a phone one below the other."""
    if not pictures:
        return
    columns = st.columns(len(pictures), gap="medium")
    for column, picture in zip(columns, pictures, strict=True):
        with column:
            widgets.show(picture)


def logs_of_family(listing: Listing) -> dict[str, TrainingLog]:
    """The logs of a run and of the trainings that belong with it, the recording's first."""
    logged = run_folder.logged_beside(listing)
    own = listing.folder.resolve().name
    related = family(own, logged)
    names = [n for n in related if n in (own, root_of(own)) or kind_of(logged[n]) == "training"]
    found = {name: run_cache.log(logged[name]) for name in names[:MOST_CURVES]}
    return {name: log for name, log in found.items() if log.steps}


def curves_of(
    listing: Listing, logs: Mapping[str, TrainingLog], height: int = overview.HEIGHT
) -> list[Picture]:
    """The losses in one picture; none where nothing was logged."""
    folder = str(run_folder.place_of(listing))
    places = run_folder.places(listing)
    return [overview.losses(folder, logs, height, places)] if logs else []


def next_steps(
    listing: Listing,
    analysis: Analysis,
    logs: Mapping[str, TrainingLog],
    plan: PrecisionPlan | None,
) -> tuple[overview.Step, ...]:
    """The commands to run after a look at a recording."""
    beside = run_folder.logged_beside(listing)
    trained = [beside[name].folder for name in by_its_plan(listing, logs)]
    # It reads the logs of both sides whole, to know whether they can be compared.
    return run_cache.once(
        listing,
        *("next steps", *map(stamp_of_run, trained)),
        make=lambda: overview.next_steps(analysis, plan),
    )


def commands(steps: Sequence[overview.Step]) -> None:
    """The commands to run next, ready to be copied."""
    if not steps:
        return
    with st.container(gap=4, key="commands"):
        st.header("Run next", anchor=False)
        for place, step in enumerate(steps):
            st.caption(in_markdown(step.reason))
            widgets.command_block(step.command, str(place))


def by_a_plan(listing: Listing) -> None:
    """A training by a plan: how it ended, its loss beside FP32's, its scale, what to run next."""
    meta = run_folder.opened(listing).meta
    logs = logs_of_family(listing)
    name = listing.folder.resolve().name
    own = logs.get(name)
    unused = unused_precision(meta)
    if unused:
        words = f"{name} {unused}, so its curve shows nothing about half precision."
        st.error(in_markdown(words), icon=":material/error:")
    root = recording_of(listing)
    words = overview.training_words(meta, own, format_of(meta))
    st.info(f"**{in_markdown(words)}**", icon=":material/model_training:")
    if root is not None:
        tiles(root, logs_of_family(root))
    pictures = curves_of(listing, logs)
    if own is not None:
        folder = str(run_folder.place_of(listing))
        pictures.append(overview.scale_picture(folder, name, own, run_folder.places(listing)))
    if pictures:
        side_by_side(pictures)
    left, right = st.columns(2, gap="medium")
    with left:
        widgets.remarks(plan_in_training.remarks({} if own is None else {name: own}))
        with st.container(horizontal=True, vertical_alignment="center"):
            if root is not None:
                recorded = run_folder.run_name(root)
                widgets.open_run(f"The recording {in_markdown(recorded)}", recorded)
            widgets.link("training", "Scale, skips and alarms")
    with right:
        commands(overview.training_steps(listing.folder, None if root is None else root.folder))


def recording_of(listing: Listing) -> Listing | None:
    """The recording that a training belongs with, by its name, in the same folder."""
    root = root_of(listing.folder.resolve().name)
    place = run_folder.place_of(listing)
    for item in run_folder.listings():
        if item.folder.name == root and run_folder.place_of(item) == place:
            return item if run_folder.is_recording(item) else None
    return None


def profile_alone(listing: Listing) -> None:
    """A profile: its verdict, four shares, its findings, what to run next."""
    profile = run_cache.profile(listing)
    if profile.get("verdict"):
        st.info(f"**{in_markdown(str(profile['verdict']))}**", icon=":material/memory:")
    if profile.get("generated"):
        st.caption(in_markdown(sentence(str(profile["generated"]))))
    if is_installed():
        view = part("views.tensor_cores")
        for cell, (label, value) in zip(st.columns(4), view.headline(profile), strict=True):
            cell.metric(label, percent(value), border=True)
        widgets.show(view.verdicts(str(listing.folder), profile))
    left, right = st.columns(2, gap="medium")
    with left:
        found = overview.profile_findings(profile)
        widgets.findings(found, overview.FINDINGS, "tensor_cores", "Kernels, causes and fixes")
    with right:
        trace = listing.folder / str(profile.get("trace") or profile.get("source") or "")
        commands(overview.profile_steps(trace))


chosen = run_folder.current()
widgets.heading(run_folder.run_name(chosen), chosen)
SHOWN = {"training": by_a_plan, "profile": profile_alone}
SHOWN.get(kind_of(chosen), recording)(chosen)
