"""What stays in FP32, what the recorded numbers prove, and the format each layer could have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.layers import Layers
from mpdiag.display.colors import BLUE, PURPLE, VERMILION
from mpdiag.display.wording import counted, in_figure, layer_name
from mpdiag.numerics.formats import FORMATS, FP16, FloatFormat
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.plotting import (
    empty,
    exponent_axis,
    figure,
    layer_axis,
    range_mark,
    row_height,
)
from mpdiag.reports.receipts import Rows
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.reports.views.sensitivity import ranking, sensitivity

if TYPE_CHECKING:
    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.reports.contents import RunContents


def operations_frame(analysis: Analysis) -> pd.DataFrame:
    """What stays in FP32, as the plan has it: ``module``, ``operation``, ``why``, ``line``."""
    rows = [
        {
            "module": layer_name(choice.module),
            "operation": choice.op or "all of it",
            "why": choice.reason,
            "line": _line(choice.evidence),
            "largest |x|": choice.evidence.get("absmax"),
            "values that overflow": choice.evidence.get("overflow"),
        }
        for choice in analysis.plan.fp32_operations
    ]
    columns = ["module", "operation", "why", "line", "largest |x|", "values that overflow"]
    frame = pd.DataFrame(rows, columns=columns)
    # A column that is empty throughout is left out.
    filled = [c for c in columns[3:] if (frame[c].notna() & (frame[c] != "")).any()]
    return frame[columns[:3] + filled]


def _line(evidence: Mapping[str, Any]) -> str:
    where, code = str(evidence.get("line") or ""), str(evidence.get("code") or "")
    return f"{where}: {code}" if where and code else where


def proven_frame(analysis: Analysis) -> pd.DataFrame:
    """Operations that the recorded numbers themselves show to need FP32, each with its line."""
    rows = [
        {
            "operation": found.op,
            "module": layer_name(found.module),
            "line": found.where,
            "code": found.text,
            "why": found.reason,
            "without it": found.without,
            "fix": found.fix,
            "already so by the policy": found.covered,
        }
        for found in analysis.operations
    ]
    return pd.DataFrame(rows)


def layer_formats_frame(analysis: Analysis) -> pd.DataFrame:
    """The narrowest format of each layer's activations and activation gradients, as the plan has it."""
    rows = [
        {
            "layer": layer_name(advice.name),
            "tensors": advice.kind.replace("_", " "),
            "format": FORMATS[advice.format].label,
            "largest |x|": advice.evidence.get("absmax"),
        }
        for advice in analysis.plan.layer_formats
    ]
    return pd.DataFrame(rows, columns=["layer", "tensors", "format", "largest |x|"])


def output_ranges_frame(layers: Layers) -> pd.DataFrame:
    """The outputs of modules: the columns of ``layers`` in ``mpdiag analyze --json``."""
    return pd.DataFrame(layers.of_kind("activation").to_json())


def output_ranges_figure(frame: pd.DataFrame, fmt: FloatFormat, most: int = 40) -> go.Figure:
    """From the smallest to the largest |x| of each module's output, against a format's ends.

    Args:
        frame: ``output_ranges_frame``.
        fmt: The format.
        most: Modules shown, those with the largest values.
    """
    known = frame[frame["absmax"] > 0] if len(frame) else frame
    if known.empty:
        return empty("no activation was recorded")
    top = known.sort_values("absmax", ascending=False, kind="stable").head(most)
    names = [str(name) for name in top["name"]]
    low, high = (np.log2(top[c].to_numpy(float)) for c in ("absmin", "absmax"))
    over = top["overflow"].to_numpy() > 0
    fig = figure(row_height(len(names)))
    labels = np.array([in_figure(name) for name in names])
    places = np.arange(len(names))
    for mask, name, colour in ((~over, f"fits {fmt.label}", BLUE), (over, "overflows", VERMILION)):
        if not mask.any():
            continue
        fig.add_bar(
            base=low[mask],
            x=(high - low)[mask],
            y=places[mask],
            orientation="h",
            width=0.5,
            name=name,
            marker={"color": colour},
            customdata=np.stack([labels[mask], low[mask], high[mask]], 1),
            hovertemplate="%{customdata[0]}: 2^%{customdata[1]:.1f} to 2^%{customdata[2]:.1f}"
            "<extra></extra>",
        )
    limit = float(np.log2(fmt.overflow_threshold))
    for place, words, colour, side in (
        (fmt.zero_exponent, "0 ←", VERMILION, "right"),
        (limit, "→ ∞", PURPLE, "left"),
    ):
        range_mark(fig, place, words, colour, side)
    layer_axis(fig, names)
    ends = [limit, float(fmt.zero_exponent), float(low.min()), float(high.max())]
    exponent_axis(fig, int(np.floor(min(ends))) - 1, int(np.ceil(max(ends))) + 2, "|x| of outputs")
    return fig.figure()


def output_ranges(run: str, layers: Layers, fmt: FloatFormat = FP16) -> Picture:
    """The range of each module's output."""
    frame = output_ranges_frame(layers)
    return Picture(
        "output-ranges",
        "From the smallest to the largest |x| of each output",
        f"Over all recorded steps. Between the lines lies {fmt.label}: no loss scale moves activations."
        f"{_beyond(frame)}",
        output_ranges_figure(frame, fmt),
        frame,
        Rows(run, "activation").ranges(),
    )


def _beyond(frame: pd.DataFrame) -> str:
    """How many of the outputs have a value that overflows, as a sentence."""
    if frame.empty:
        return ""
    over = int((frame["overflow"] > 0).sum())
    return f" {over} of {counted(len(frame), 'output')} overflow in FP16." if over else ""


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: operations by sensitivity, and the range of each output."""
    analysis, run = contents.analysis, str(contents.folder)
    outputs = analysis.layers.of_kind("activation")
    outputs = in_model_order(outputs, contents.modules)
    if len(outputs):
        ranked = ranking(contents)
        yield sensitivity(run, ranked)
        yield output_ranges(run, outputs)


VIEW = View("operations", "Operations", "function", reported)
