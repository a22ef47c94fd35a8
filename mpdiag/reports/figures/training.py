"""Trainings: loss curves, the loss scale with its skips, and replays of a scaler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.numerics.formats import FP16
from mpdiag.reports.figures.style import empty, figure
from mpdiag.reports.palette import GREEN, PURPLE, SERIES, VERMILION
from mpdiag.reports.words import beginning, in_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go

LONGEST = 120
"""Characters of a reason or a message under the pointer."""
_DASHES = ("solid", "dash", "dot", "dashdot")


def losses(frame: pd.DataFrame, *, log: bool = False, window: int = 1) -> go.Figure:
    """Loss curves (``losses_frame``), a line for each run.

    Args:
        frame: The table.
        log: A log scale; what is not positive is left out there.
        window: Steps of a running median, drawn over the pale raw line.
    """
    if frame.empty:
        return empty("no training log")
    fig = figure(380)
    for i, (run, part) in enumerate(frame.groupby("run", sort=False)):
        name, colour = in_figure(str(run)), SERIES[i % len(SERIES)]
        y = part["loss"].where(np.isfinite(part["loss"].astype(float)))
        hover = "step %{x}: %{y:.5g}<extra>" + name + "</extra>"
        smooth = window > 1
        fig.add_scatter(
            x=part["step"],
            y=y,
            name=name,
            mode="lines",
            showlegend=not smooth,
            opacity=0.28 if smooth else 1.0,
            line={"color": colour, "width": 1 if smooth else 2, "dash": _DASHES[i % 4]},
            hovertemplate=hover,
        )
        if smooth:
            fig.add_scatter(
                x=part["step"],
                y=y.rolling(window, min_periods=1, center=True).median(),
                name=name,
                mode="lines",
                line={"color": colour, "width": 2.5, "dash": _DASHES[i % 4]},
                hovertemplate=hover,
            )
    fig.update_xaxes(title="step")
    fig.update_yaxes(title="loss", type="log" if log else "linear")
    if log:
        _log10_axis(fig, frame["loss"])
    return fig


def scale(frame: pd.DataFrame) -> go.Figure:
    """The loss scales of some trainings (``scales_frame``), a cross at each skip with its cause."""
    if frame.empty:
        return empty("no steps")
    fig = figure(300)
    for i, (run, part) in enumerate(frame.groupby("run", sort=False)):
        name, colour = in_figure(str(run)), SERIES[i % len(SERIES)]
        fig.add_scatter(
            x=part["step"],
            y=part["scale"],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5, "shape": "hv", "dash": _DASHES[i % 4]},
            hovertemplate="step %{x}: scale %{y:g}<extra>" + name + "</extra>",
        )
    skipped = frame[frame["skipped"]]
    if len(skipped):
        fig.add_scatter(
            x=skipped["step"],
            y=skipped["scale"],
            name=f"skipped ({len(skipped)})",
            mode="markers",
            marker={"color": VERMILION, "symbol": "x", "size": 10},
            customdata=[in_figure(beginning(str(r), LONGEST)) for r in skipped["reason"]],
            hovertemplate="step %{x} skipped: %{customdata}<extra></extra>",
        )
    _log2_axis(fig, frame["scale"])
    fig.update_xaxes(title="step")
    return fig


def drift(norms: pd.DataFrame, alarms: pd.DataFrame, runs: Sequence[str]) -> go.Figure:
    """Norms of the unscaled gradients (``norms_frame``), a mark where an alarm was raised.

    Args:
        norms: The table.
        alarms: ``alarms_frame``.
        runs: In the order of the other figures, so that each keeps its colour.
    """
    known = norms[np.isfinite(norms["gradient_norm"]) & (norms["gradient_norm"] > 0)]
    if known.empty:
        return empty("no norm of gradients was logged")
    fig = figure(300)
    for i, run in enumerate(runs):
        part, name = known[known["run"] == run], in_figure(str(run))
        if part.empty:
            continue
        colour = SERIES[i % len(SERIES)]
        fig.add_scatter(
            x=part["step"],
            y=part["gradient_norm"],
            name=name,
            mode="lines",
            line={"color": colour, "width": 1.5, "dash": _DASHES[i % 4]},
            hovertemplate="step %{x}: %{y:.4g}<extra>" + name + "</extra>",
        )
    if len(alarms):
        heights = []
        for alarm in alarms.to_dict("records"):
            own = known[known["run"] == alarm["run"]]
            near = own.iloc[(own["step"] - alarm["step"]).abs().argsort()[:1]]["gradient_norm"]
            heights.append(
                float(near.iloc[0]) if len(near) else float(known["gradient_norm"].max())
            )
        fig.add_scatter(
            x=alarms["step"],
            y=heights,
            name=f"alarms ({len(alarms)})",
            mode="markers",
            marker={"color": VERMILION, "symbol": "triangle-up", "size": 13},
            customdata=[
                in_figure(beginning(f"{a}: {m}", LONGEST))
                for a, m in zip(alarms["run"], alarms["message"], strict=True)
            ],
            hovertemplate="step %{x}, %{customdata}<extra></extra>",
        )
    _log10_axis(fig, known["gradient_norm"])
    fig.update_yaxes(type="log", title="‖gradients‖")
    fig.update_xaxes(title="step")
    return fig


def replay(frame: pd.DataFrame) -> go.Figure:
    """A scaler replayed over a recording (``replay_frame``), under what each step admits."""
    if frame.empty:
        return empty("no recorded gradients")
    fig = figure(340)
    finite = frame[np.isfinite(frame["absmax"]) & (frame["absmax"] > 0)]
    fig.add_scatter(
        x=finite["step"],
        y=FP16.overflow_threshold / finite["absmax"],
        name="overflows from here",
        mode="lines",
        line={"color": PURPLE, "width": 1.5, "dash": "dot"},
        hovertemplate="step %{x}: overflows at %{y:.4g}<extra></extra>",
    )
    fig.add_scatter(
        x=frame["step"],
        y=frame["scale"],
        name="loss scale",
        mode="lines+markers",
        line={"color": GREEN, "width": 2.5, "shape": "hv"},
        marker={"size": 5},
        customdata=frame["lost_share"],
        hovertemplate="step %{x}: scale %{y:g}, %{customdata:.2%} lost<extra></extra>",
    )
    skipped = frame[frame["overflow"]]
    if len(skipped):
        fig.add_scatter(
            x=skipped["step"],
            y=skipped["scale"],
            name=f"skipped ({len(skipped)})",
            mode="markers",
            marker={"color": VERMILION, "symbol": "x", "size": 11},
            hovertemplate="step %{x}: skipped<extra></extra>",
        )
    _log2_axis(fig, [*frame["scale"], *(FP16.overflow_threshold / finite["absmax"])])
    fig.update_xaxes(title="step")
    return fig


def _log10_axis(fig: go.Figure, values: object) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, each written out."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known) & (known > 0)]
    if known.size == 0:
        return
    low, high = float(known.min()), float(known.max())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    places = [m * 10.0**e for e in decades for m in steps]
    fig.update_yaxes(tickmode="array", tickvals=places, ticktext=[f"{p:g}" for p in places])


def _log2_axis(fig: go.Figure, values: object) -> None:
    known = np.asarray(values, float)
    known = known[np.isfinite(known) & (known > 0)]
    low = math.floor(np.log2(known.min())) if known.size else 0
    high = math.ceil(np.log2(known.max())) if known.size else 1
    step = max(1, -(-(high - low) // 8))
    places = range(low, high + 1, step)
    fig.update_yaxes(
        type="log",
        title="loss scale",
        tickmode="array",
        tickvals=[2.0**e for e in places],
        ticktext=[f"2<sup>{e}</sup>" for e in places],
        range=[math.log10(2.0) * (low - 0.5), math.log10(2.0) * (high + 0.5)],
    )
