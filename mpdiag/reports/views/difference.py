"""Where two runs part, in one picture: layers down, the passes of each step and rank across."""

import math

import numpy as np
import pandas as pd

from mpdiag.analysis.difference.diff import RunDifference
from mpdiag.display.colors import BLUE, ORANGE, VERMILION, rgba
from mpdiag.display.wording import in_figure
from mpdiag.reports import plotting
from mpdiag.reports.picture import Picture

OUTSIDE = "(outside)"
"""What belongs to no module."""
PASSES = ("forward", "backward", "gradient", "update")
"""The columns of a step: its passes, and what parameters have after them."""
_AFTER = {"weight_grad": "gradient", "updated_weight": "update"}
_DECADES = 3
"""Powers of ten below and above the tolerance that colours tell apart."""
_COLOURS = ([0.0, rgba(BLUE, 0.15)], [0.5, BLUE], [0.5, ORANGE], [1.0, VERMILION])
_CAPTION = (
    "Each cell shows the tensor of a module and a pass that is furthest apart. Rounding explains blue "
    "cells. The cross marks where the runs part first."
)


def difference_frame(found: RunDifference) -> pd.DataFrame:
    """The tensor of each module and pass that is furthest apart beside its tolerance.

    Returns:
        In the model's order: ``module``, ``step``, ``pass`` (or ``gradient`` and ``update`` of
        parameters), ``rank`` (-1 for all together), ``tensor``: the operation, or what it is;
        ``difference`` and ``tolerance`` beside its size, ``ratio``: the one over the other.
    """
    rows = [
        {
            "order": math.inf if j.pair.a.kind == "weight" else j.pair.a.order,
            "module": j.pair.a.module or OUTSIDE,
            "step": j.step,
            "pass": _AFTER.get(j.pair.a.kind, j.pair.a.phase),
            "rank": -1 if j.rank is None else j.rank,
            "tensor": j.pair.a.name or j.pair.a.kind,
            "difference": j.apart.difference,
            "tolerance": j.apart.tolerance,
            "ratio": j.apart.ratio,
        }
        for j in found.judged
        if j.pair.certain
    ]
    frame = pd.DataFrame(rows)
    frame["order"] = frame.groupby("module")["order"].transform("min")
    furthest = frame.groupby(["module", "step", "pass", "rank"], sort=False)["ratio"].idxmax()
    return frame.loc[furthest].sort_values("order", kind="stable").drop(columns="order")


def difference_picture(found: RunDifference) -> Picture:
    """The ratios of ``difference_frame`` in colour; a cross marks where the runs part."""
    frame, first = difference_frame(found), found.first
    layers = list(dict.fromkeys(frame["module"]))
    height = plotting.row_height(len(layers)) + 3 * plotting.MARK
    fig = plotting.figure(height, showlegend=False, hovermode="closest")
    columns = frame.assign(place=frame["pass"].map(PASSES.index))
    cells = columns.sort_values(["step", "place", "rank"], kind="stable")
    decades = np.arange(-_DECADES, _DECADES + 1)
    with np.errstate(divide="ignore"):
        shown = np.log10(cells["ratio"].to_numpy(float)).clip(-_DECADES, _DECADES)
    fig.add_heatmap(
        x=_across(cells),
        y=cells["module"].map(layers.index),
        z=shown,
        zmin=-_DECADES,
        zmax=_DECADES,
        colorscale=_COLOURS,
        colorbar={
            "tickvals": decades,
            "ticktext": [f"{10.0**d:g}" for d in decades],
            "thickness": 12,
        },
        xgap=1,
        ygap=1,
        customdata=cells[["difference", "tolerance"]],
        text=[
            in_figure(f"{m}: {t}") for m, t in zip(cells["module"], cells["tensor"], strict=True)
        ],
        hovertemplate="%{text}<br>%{customdata[0]:.2g}, tolerance %{customdata[1]:.2g}<extra></extra>",
    )
    if first is not None:
        at = [first.module or OUTSIDE, first.step, _AFTER.get(first.kind, first.phase)]
        here = cells[(cells[["module", "step", "pass"]] == at).all(axis=1)]
        here = here[(here["rank"] == first.rank) | (first.rank is None)]
        mark = {"symbol": "x", "size": 11, "color": "black", "line": {"color": "white", "width": 1}}
        rows = here["module"].map(layers.index)
        fig.add_scatter(x=_across(here), y=rows, mode="markers", marker=mark, hoverinfo="skip")
    plotting.layer_axis(fig, layers)
    fig.update_xaxes(side="top", showgrid=False)
    return Picture("difference", "Difference over tolerance", _CAPTION, fig, frame, "")


def _across(cells: pd.DataFrame) -> list[list[str]]:
    """Where cells stand: steps, and within each its passes and ranks."""
    ranks = ["" if rank < 0 else f" {rank}" for rank in cells["rank"]]
    passes = [f"{name}{rank}" for name, rank in zip(cells["pass"], ranks, strict=True)]
    return [[f"step {step}" for step in cells["step"]], passes]
