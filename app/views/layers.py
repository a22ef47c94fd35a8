"""Layers: all of them with their course over the steps, or one of them in full."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import layer_course
import numpy as np
import run_cache
import run_folder
import streamlit as st
import widgets
from layer_links import unless_set

from mpdiag.analysis.layer_history import history_of
from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    in_markdown,
    layer_name,
    magnitude,
    percent,
    scale_text,
    sentence,
)
from mpdiag.reports.views import operations
from mpdiag.reports.views.gradients.frame import SCALES, one_layer
from mpdiag.reports.views.gradients.pictures import Gradients

if TYPE_CHECKING:
    import pandas as pd

    from mpdiag.analysis.layers import Layers
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.schema import Kind

chosen = run_folder.current()
widgets.heading("Layers", chosen)
analysis = run_cache.analysis(chosen)
run = str(chosen.folder)


def view() -> None:
    """The page of one layer if one is chosen, else all of them."""
    kinds = [k for k in KIND_NAMES if k in set(analysis.layers.kinds) and k != "update"]
    if not kinds:
        st.info("This run recorded no layers.")
        return
    known = {layer_name(str(n)): str(n) for n in dict.fromkeys(analysis.layers.names)}
    parameters = {str(n) for n in analysis.layers.of_kind("weight_grad", "weight", "update").names}
    modules = {label: name for label, name in known.items() if name not in parameters}
    widgets.unless_known("layer", "layer", known, "which this run does not have.")
    first, second = st.columns([1.3, 2], vertical_alignment="bottom")
    label = second.selectbox(
        "One layer",
        [*modules, *(label for label in known if label not in modules)],
        index=None,
        key="layer",
        bind="query-params",
        placeholder="type part of its name",
    )
    kind = widgets.choose_kind(first, kinds)
    if label is not None:
        show_layer(known[label], kind)
        return
    all_layers(kind)


def all_layers(kind: Kind) -> None:
    """The table of all layers."""
    text = st.text_input(
        "Find layers", key="find", placeholder="part of a name", bind="query-params"
    )
    late = kind == "activation_grad" and analysis.loss_scale.window is not None
    layers = run_cache.late_layers(chosen) if late else run_cache.layers(chosen, kind)
    named = layer_course.layers_named(layers, text or "")
    if not len(named):
        st.info(in_markdown(f"No layer name contains “{text}”."))
        return
    frame = run_cache.once(chosen, "layer overview", kind, text, make=lambda: overview(kind, named))
    shown_table(frame, kind)


def overview(kind: Kind, layers: Layers) -> pd.DataFrame:
    """These layers, with their course over the steps."""
    records, fmt = analysis.run.records, analysis.target
    course = run_cache.once(
        *(chosen, "layer course", kind), make=lambda: layer_course.course_frame(records, kind, fmt)
    )
    updates = run_cache.once(
        chosen, "update course", make=lambda: layer_course.update_course_frame(records)
    )
    types = {str(m["name"]): str(m["type"]) for m in analysis.run.modules()}
    return layer_course.overview_frame(analysis, layers, course, updates, types)


def shown_table(frame: pd.DataFrame, kind: Kind) -> None:
    """The table; a click on a row opens its layer."""
    scale = scale_text(analysis.plan.loss_scale.recommended)
    scaled = kind.endswith("grad") and analysis.plan.loss_scale.recommended != 1
    hidden = [] if scaled else ["sum_share_scaled"]
    hidden += [] if frame["update_ratio"].notna().any() else ["update_ratio", "update_course"]
    order = ("layer", "type", "sum_share", "lost_course", "sum_share_scaled", "lost_share")
    order += ("absmax", "largest_course", "update_ratio", "update_course")
    shown = frame.assign(layer=frame["layer"].map(layer_name))
    shown = shown[[name for name in order if name not in hidden]]
    st.session_state["layer_rows"] = shown["layer"].tolist()
    column = st.column_config
    # Curves of shares have a common height, so that one can be compared with another.
    tallest = max((max(c, default=0.0) for c in frame["lost_course"]), default=0.0)
    share = {"y_min": 0.0, "y_max": max(tallest, 1e-4)}
    st.dataframe(
        shown.style.format(
            {
                **dict.fromkeys(("sum_share", "sum_share_scaled", "lost_share"), percent),
                "absmax": magnitude,
                "update_ratio": lambda ratio: "" if isnan(ratio) else f"2^{ratio:.1f}",
            }
        ),
        key="layer_table",
        hide_index=True,
        on_select=open_row,
        selection_mode="single-cell",
        placeholder="",
        height=min(36 * (len(shown) + 1), 520),
        column_config={
            "layer": column.TextColumn("layer", pinned=True, width=130),
            "type": column.TextColumn("type", width=90),
            "sum_share": column.NumberColumn("sum lost", width=78),
            "lost_course": column.LineChartColumn("over steps", width=110, **share),
            "sum_share_scaled": column.NumberColumn(f"at {scale}", width=78),
            "lost_share": column.NumberColumn("values lost", width=86),
            "absmax": column.NumberColumn("largest |x|", width=84),
            "largest_course": column.LineChartColumn("largest, log2", width=110),
            "update_ratio": column.NumberColumn("|Δw| / |w|", width=84),
            "update_course": column.LineChartColumn("ratio, log2", width=110),
        },
    )
    st.caption(in_markdown(table_words(frame, kind)))


def open_row() -> None:
    """Take the layer of the row that was clicked."""
    cells = st.session_state["layer_table"]["selection"]["cells"]
    if cells:
        st.session_state["layer"] = st.session_state["layer_rows"][int(cells[0][0])]


def table_words(frame: pd.DataFrame, kind: Kind) -> str:
    """What the table's columns are of."""
    late = analysis.loss_scale.window if kind == "activation_grad" else None
    when = "over all recorded steps" if late is None else late.words
    points = max((len(c) for c in frame["lost_course"]), default=0)
    fmt = analysis.target.label
    ratio = "; |Δw| / |w| is a geometric mean" if frame["update_ratio"].notna().any() else ""
    return (
        f"Lost: becomes 0 in {fmt} without a loss scale, {when}. “sum” is Σ|x|, estimated. Curves "
        f"show all recorded steps, in {counted(points, 'point')}{ratio}. Click a layer to open it."
    )


# -- one layer -------------------------------------------------------------------------------------


def show_layer(name: str, kind: Kind) -> None:
    """One layer of a run.

    Args:
        name: The layer, a module or a parameter.
        kind: The tensors asked for; others are shown where the layer has none of these.
    """
    st.button("All layers", icon=":material/arrow_back:", on_click=_leave)
    rows = [m for m in analysis.run.modules() if str(m["name"]) == name]
    kinds = [str(m["type"]) for m in rows if m.get("type")][:1]
    st.header(in_markdown(" · ".join([layer_name(name), *kinds])), anchor=False)
    own = [k for k in KIND_NAMES if len(one_layer(analysis.layers.of_kind(k), name))]  # type: ignore[arg-type]
    _described(name)
    if not own:
        return
    if kind not in own:
        st.caption(
            in_markdown(
                f"This layer has no recorded {KIND_NAMES[kind]}. Shown: {KIND_NAMES[own[0]]}."
            )
        )
        kind = own[0]  # type: ignore[assignment]
    _figures(name, kind)
    _operations(name)


def _leave() -> None:
    st.session_state["layer"] = None


def _described(name: str) -> None:
    """What it loses and decides, and what to do."""
    story = run_cache.once(chosen, "story", name, make=lambda: history_of(analysis, name))
    facts = [
        f"keep it in FP32: {c.reason}" for c in analysis.plan.fp32_operations if c.module == name
    ]
    facts += list(story.roles)
    if story.swallowed is not None:
        facts.append(f"FP16 weights would round away {percent(story.swallowed)} of its updates")
    if facts:
        st.markdown("\n".join(f"- {in_markdown(sentence(fact))}" for fact in facts))


def _controls(kind: Kind) -> tuple[FloatFormat, int]:
    left, right = st.columns([1, 1.4], vertical_alignment="bottom")
    fmt = widgets.choose_format(left, analysis.target)
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
        help=f"The plan's loss scale: {scale_text(plan.recommended)}. It multiplies gradients only.",
    )
    return fmt, exponent if kind.endswith("grad") else 0


def _figures(name: str, kind: Kind) -> None:
    """Its histograms over the steps, and its curves."""
    records = analysis.run.records

    @st.fragment
    def figures() -> None:
        fmt, exponent = _controls(kind)
        layer = layer_course.Layer(run, records, kind, name, fmt, exponent)
        left, right = st.columns(2, gap="medium")
        with left:
            widgets.show(layer.over_time())
        with right:
            widgets.show(layer.course())
        all_layers = Gradients(run, kind, run_cache.layers(chosen, kind), fmt)
        widgets.show(all_layers.histogram(exponent, layer=name))

    figures()


def _operations(name: str) -> None:
    """The operations of the layer, as far as the run folder knows them."""
    st.header("Operations", anchor=False)
    contents = run_cache.contents(chosen)
    found = run_cache.once(chosen, "ranking", make=lambda: operations.ranking(contents))
    frame = operations.shown(found)
    column = "module" if "module" in frame else frame.columns[0]
    mine = frame[frame[column] == layer_name(name)]
    if len(mine):
        widgets.table(mine.drop(columns=column))
    else:
        st.markdown(
            "mpdiag neither recorded an operation of this layer nor measured its sensitivity."
        )


view()
