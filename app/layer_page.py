"""The page of one layer, and of one step: what is lost, when, where, and what moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import layer_links
import numpy as np
import run_cache
import streamlit as st
import widgets
from figure_card import figure_card
from layer_links import unless_set

from mpdiag.analysis.layer_history import history_of
from mpdiag.display.wording import (
    KIND_NAMES,
    in_markdown,
    layer_name,
    percent,
    scale_text,
    sentence,
)
from mpdiag.numerics.formats import FORMATS, TARGETS
from mpdiag.reports.views import layer_tables as tables
from mpdiag.reports.views import layers as pictures
from mpdiag.reports.views import sensitivity
from mpdiag.reports.views.gradients.frame import SCALES, one_layer
from mpdiag.reports.views.gradients.pictures import Gradients
from mpdiag.runs.training_log import FILE

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.run import Listing
    from mpdiag.runs.schema import Kind
    from mpdiag.runs.training_log import TrainingLog


def show_layer(chosen: Listing, name: str, kind: Kind) -> None:
    """One layer of a run.

    Args:
        chosen: The run.
        name: The layer, a module or a parameter.
        kind: The tensors asked for; others are shown where the layer has none of these.
    """
    analysis = run_cache.analysis(chosen)
    st.button("All layers", icon=":material/arrow_back:", on_click=_leave)
    rows = [m for m in analysis.run.modules() if str(m["name"]) == name]
    kinds = [str(m["type"]) for m in rows if m.get("type")][:1]
    st.header(in_markdown(" · ".join([layer_name(name), *kinds])), anchor=False)
    own = [k for k in KIND_NAMES if len(one_layer(analysis.layers.of_kind(k), name))]  # type: ignore[arg-type]
    _described(chosen, name)
    if not own:
        return
    if kind not in own:
        st.caption(
            in_markdown(
                f"No {KIND_NAMES[kind]} of it were recorded; these are {KIND_NAMES[own[0]]}."
            )
        )
        kind = own[0]  # type: ignore[assignment]
    _figures(chosen, name, kind)
    _operations(chosen, name)


def _leave() -> None:
    st.session_state["layer"] = None


def _described(chosen: Listing, name: str) -> None:
    """What it loses and decides, and what to do."""
    analysis = run_cache.analysis(chosen)
    story = run_cache.once(chosen, "story", name, make=lambda: history_of(analysis, name))
    facts = [
        f"keep it in FP32: {c.reason}" for c in analysis.plan.fp32_operations if c.module == name
    ]
    facts += list(story.roles)
    if story.swallowed is not None:
        facts.append(f"FP16 weights would round away {percent(story.swallowed)} of its updates")
    if facts:
        st.markdown("\n".join(f"- {in_markdown(sentence(fact))}" for fact in facts))


def _controls(chosen: Listing, kind: Kind) -> tuple[FloatFormat, int]:
    analysis = run_cache.analysis(chosen)
    left, right = st.columns([1, 1.4], vertical_alignment="bottom")
    name = left.segmented_control(
        "Format",
        [fmt.name for fmt in TARGETS],
        **unless_set("format", default=analysis.target.name),
        required=True,
        format_func=lambda f: FORMATS[f].label.replace("FP8 ", ""),
        key="format",
        bind="query-params",
    )
    plan = analysis.plan.loss_scale
    exponent = right.slider(
        "Loss scale",
        SCALES[0],
        SCALES[-1],
        **unless_set("scale", value=max(SCALES[0], int(np.log2(plan.recommended)))),
        format="2^%d",
        key="scale",
        bind="query-params",
        disabled=not kind.endswith("grad"),
        help=f"The plan's: {scale_text(plan.recommended)}. It multiplies gradients.",
    )
    return FORMATS[name or analysis.target.name], exponent if kind.endswith("grad") else 0


def _figures(chosen: Listing, name: str, kind: Kind) -> None:
    """Its histograms over the steps, and its curves."""
    records, run = run_cache.analysis(chosen).run.records, str(chosen.folder)

    @st.fragment
    def figures() -> None:
        fmt, exponent = _controls(chosen, kind)
        layer = pictures.Layer(run, records, kind, name, fmt, exponent)
        left, right = st.columns(2, gap="medium")
        with left:
            widgets.show(layer.over_time())
            widgets.show(layer.film())
        with right:
            widgets.show(layer.ridges())
            widgets.show(layer.course())
        all_layers = Gradients(run, kind, run_cache.layers(chosen, kind), fmt)
        widgets.show(all_layers.histogram(exponent, layer=name))

    figures()


def _operations(chosen: Listing, name: str) -> None:
    """The operations of the layer, as far as the run folder knows them."""
    st.header("Operations", anchor=False)
    contents = run_cache.contents(chosen)
    found = run_cache.once(chosen, "ranking", make=lambda: sensitivity.ranking(contents))
    frame = sensitivity.shown(found)
    column = "module" if "module" in frame else frame.columns[0]
    mine = frame[frame[column] == layer_name(name)]
    if len(mine):
        widgets.table(mine.drop(columns=column))
    else:
        st.markdown(
            "The run folder holds no operation of this layer: neither a recording of operations nor "
            "a measurement of their sensitivity names it."
        )


# -- one step --------------------------------------------------------------------------------------


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
                **unless_set("step", value=str(_first(steps, log))),
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
