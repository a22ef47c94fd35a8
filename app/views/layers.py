"""Layers: all of them with their course over the steps, one of them in full, and one step."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import layer_page
import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    in_markdown,
    layer_name,
    magnitude,
    percent,
    scale_text,
)
from mpdiag.reports.views import layer_tables as tables
from mpdiag.reports.views import layers as pictures
from mpdiag.reports.views.gradients.frame import layers_named

if TYPE_CHECKING:
    import pandas as pd

    from mpdiag.runs.schema import Kind

chosen = run_folder.current()
widgets.heading("Layers", chosen)
analysis = run_cache.analysis(chosen)
run = str(chosen.folder)


def view() -> None:
    """The page of one layer if one is chosen, else all of them and one step."""
    kinds = [k for k in KIND_NAMES if k in set(analysis.layers.kinds) and k != "update"]
    if not kinds:
        st.info("Nothing of any layer was recorded in this run.")
        return
    known = {layer_name(str(n)): str(n) for n in dict.fromkeys(analysis.layers.names)}
    parameters = {str(n) for n in analysis.layers.of_kind("weight_grad", "weight", "update").names}
    modules = {label: name for label, name in known.items() if name not in parameters}
    first, second = st.columns([1.3, 2], vertical_alignment="bottom")
    label = second.selectbox(
        "One layer",
        [*modules, *(label for label in known if label not in modules)],
        index=None,
        key="layer",
        bind="query-params",
        placeholder="type a part of its name",
    )
    kind: Kind = first.selectbox(
        "Tensors",
        kinds,
        format_func=lambda k: KIND_NAMES[k],
        key="kind",
        bind="query-params",
    )
    if label is not None:
        layer_page.show_layer(chosen, known[label], kind)
        return
    everything, one_step = st.tabs(["All layers", "One step"], key="tab", bind="query-params")
    with everything:
        all_layers(kind)
    with one_step:
        layer_page.show_step(chosen, kind)


def all_layers(kind: Kind) -> None:
    """The table of all layers, and the module tree."""
    text = st.text_input(
        "Find layers", key="find", placeholder="part of a name", bind="query-params"
    )
    window = analysis.loss_scale.window if kind == "activation_grad" else None
    named = layers_named(
        run_cache.late_layers(chosen) if window is not None else run_cache.layers(chosen, kind),
        text or "",
    )
    if not len(named):
        st.info(in_markdown(f"No layer has “{text}” in its name."))
        return
    frame = run_cache.once(
        *(chosen, "layer overview", kind, text), make=lambda: overview(kind, text or "")
    )
    shown_table(frame, kind)
    widgets.show(pictures.module_tree(run, frame, kind, analysis.target, window))


def overview(kind: Kind, text: str) -> pd.DataFrame:
    """All layers whose name contains a text."""
    records, fmt = analysis.run.records, analysis.target
    course = run_cache.once(
        *(chosen, "layer course", kind), make=lambda: tables.course_frame(records, kind, fmt)
    )
    updates = run_cache.once(
        chosen, "update course", make=lambda: tables.update_course_frame(records)
    )
    late = kind == "activation_grad" and analysis.loss_scale.window is not None
    layers = run_cache.late_layers(chosen) if late else run_cache.layers(chosen, kind)
    types = {str(m["name"]): str(m["type"]) for m in analysis.run.modules()}
    return tables.overview_frame(analysis, layers_named(layers, text), course, updates, types)


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
        f"Lost: what {fmt} makes 0 without a loss scale, {when}; “sum” is Σ|x|, estimated. "
        f"Curves: all recorded steps, in {counted(points, 'point')}{ratio}. A click opens a layer."
    )


view()
