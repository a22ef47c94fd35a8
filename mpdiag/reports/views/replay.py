"""A loss scaler replayed over a recording: its scale at each step, and what it would have lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mpdiag.display.colors import GREEN, PURPLE, VERMILION
from mpdiag.numerics.formats import FP16
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure, log2_axis
from mpdiag.reports.receipts import command

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mpdiag.analysis.scaling.replay import Replay


def replay_frame(played: Replay) -> pd.DataFrame:
    """A scaler's replay: ``step``, ``scale``, ``absmax``, ``overflow``, ``lost_share``."""
    return pd.DataFrame(
        {
            "step": played.steps,
            "scale": played.scale,
            "absmax": played.absmax,
            "overflow": played.overflow,
            "lost_share": played.lost,
        }
    )


def replay_figure(frame: pd.DataFrame) -> go.Figure:
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
    log2_axis(fig, [*frame["scale"], *(FP16.overflow_threshold / finite["absmax"])])
    fig.update_xaxes(title="step")
    return fig.figure()


def replayed(run: str, played: Replay, arguments: str) -> Picture:
    """A scaler replayed over the recorded steps."""
    frame = replay_frame(played)
    return Picture(
        "replay",
        "Loss-scale replay",
        "What this scaler would have done with the recorded gradients. Exact for recorded steps; those "
        "between two of them are taken to reach the smaller of their maxima. A point says how much "
        "of all activation gradients FP16 loses at its step and scale.",
        replay_figure(frame),
        frame,
        command(f"mpdiag replay {run} {arguments} --json"),
    )
