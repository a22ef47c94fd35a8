"""Where a profile's kernel time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.reports.figures.style import empty, figure, layer_axis, row_height
from mpdiag.reports.frames.tensorcores import by_kernel
from mpdiag.reports.palette import VERDICTS
from mpdiag.reports.words import beginning, in_figure, kernel_label, percent

LABEL = 44

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import plotly.graph_objects as go


def verdicts(frame: pd.DataFrame, words: Mapping[str, str]) -> go.Figure:
    """Kernel time by verdict (``verdict_frame``), one bar; ``words`` is what verdicts are called."""
    if frame["time_us"].sum() == 0:
        return empty("the profile holds no kernel time")
    fig = figure(150, barmode="stack", legend_traceorder="normal")
    for row in frame[frame["time_us"] > 0].to_dict("records"):
        name = words[str(row["verdict"])]
        fig.add_bar(
            x=[row["share"]],
            y=[""],
            orientation="h",
            name=f"{name}: {percent(row['share'])}",
            marker={"color": VERDICTS.get(str(row["verdict"]), VERDICTS["unknown"])},
            hovertemplate=f"{name}: {row['time_us']:,.0f} µs<extra></extra>",
        )
    fig.update_xaxes(tickformat=".0%", range=[0, 1], title="share of kernel time")
    return fig


def kernels(frame: pd.DataFrame, words: Mapping[str, str], most: int = 15) -> go.Figure:
    """The longest kernels (``kernel_frame``), all places together, coloured by verdict."""
    if frame.empty:
        return empty("the profile holds no kernels")
    top = by_kernel(frame).head(most)
    names = [beginning(kernel_label(str(name)), LABEL) for name in top["name"]]
    fig = figure(row_height(len(names)))
    for verdict, colour in VERDICTS.items():
        part = top[top["verdict"] == verdict]
        if part.empty:
            continue
        fig.add_bar(
            x=part["time_us"],
            y=list(part.index),
            orientation="h",
            name=words[verdict],
            showlegend=True,
            marker={"color": colour},
            customdata=[in_figure(str(n)[:120]) for n in part["name"]],
            hovertemplate="%{customdata}<br>%{x:,.0f} µs<extra>" + words[verdict] + "</extra>",
        )
    layer_axis(fig, names, LABEL)
    fig.update_xaxes(title="time (µs)")
    return fig
