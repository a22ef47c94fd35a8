"""One step: from a rise of the loss to the layers whose gradients moved at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import layer_links
import run_cache
import streamlit as st
from figure_card import figure_card

from mpdiag.reports.views.layers import frame as tables
from mpdiag.reports.views.layers import pictures
from mpdiag.runs.training_log import FILE

if TYPE_CHECKING:
    from mpdiag.runs.run import Listing
    from mpdiag.runs.schema import Kind
    from mpdiag.runs.training_log import TrainingLog


def show_step(chosen: Listing, kind: Kind) -> None:
    """The loss curve, and what moved at the step that is selected on it."""
    analysis = run_cache.analysis(chosen)
    records, run = analysis.run.records, str(chosen.folder)
    steps = tables.recorded_steps(records, kind)
    if len(steps) < 2:
        st.info("One recorded step has nothing before it to be compared with.")
        return
    log = _log(chosen)

    @st.fragment
    def step_view() -> None:
        asked = _clicked()
        if asked is not None:
            st.session_state["step"] = str(tables.nearest_step(steps, asked))
        words = [str(s) for s in steps]
        step = int(
            st.select_slider(
                "Recorded step",
                words,
                **layer_links.unless_set("step", value=str(_first(steps, log))),
                key="step",
                bind="query-params",
                help="The steps whose gradients were recorded; a click on the loss selects one, too.",
            )
        )
        if asked is not None and step != asked:
            st.caption(
                f"The gradients of step {asked:,} were not recorded; {step:,} is the nearest step."
            )
        if log is not None:
            figure_card(pictures.loss_curve(run, log, steps, step), selectable=True)
        picture = pictures.movement(run, records, kind, step, analysis.target)
        points = figure_card(picture, selectable=True)
        if points:
            layer_links.open_layer(str(points[0]["customdata"]), kind)

    step_view()


def _clicked() -> int | None:
    """The step of the loss curve that was clicked just now; None if none was."""
    event = st.session_state.get("figure-loss-of-recording")
    points = event["selection"]["points"] if event else []
    if not points or st.session_state.get("clicked_step") == points[0]["x"]:
        return None
    st.session_state["clicked_step"] = points[0]["x"]
    return int(points[0]["x"])


def _log(chosen: Listing) -> TrainingLog | None:
    """The run's own log, if it has a loss."""
    if not (chosen.folder / FILE).is_file():
        return None
    log = run_cache.log(chosen)
    return log if any(s.loss is not None for s in log.steps) else None


def _first(steps: Any, log: TrainingLog | None) -> int:
    """The step shown first: the recorded one nearest to the largest rise of the loss."""
    rises = tables.loss_rises(log) if log is not None else ()
    wanted = int(rises["step"].iloc[0]) if len(rises) else int(steps[-1])
    return tables.nearest_step(steps[1:], wanted) or int(steps[-1])
