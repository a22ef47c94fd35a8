"""Operations by their sensitivity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.reports.figures.style import empty, figure, layer_axis, row_height
from mpdiag.reports.palette import BLUE, PURPLE, VERMILION
from mpdiag.reports.words import in_figure, layer_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import plotly.graph_objects as go

_NONE = "no operation was recorded"


def sensitivity(frame: pd.DataFrame, value: str, most: int = 30) -> go.Figure:
    """A mark for each operation (``Ranking.frame``), the most sensitive on top.

    Args:
        frame: The ranking.
        value: What ranks, in words.
        most: So many are drawn.
    """
    moved = frame[frame["value"] > 0]  # what changes nothing has no place on a log scale
    top = (moved if len(moved) else frame).head(most).reset_index(drop=True)
    if top.empty:
        return empty(_NONE)
    names = [
        f"{layer_name(str(m))} · {op}" if op else layer_name(str(m))
        for m, op in zip(top["module"], top["operation"], strict=True)
    ]
    fig = figure(row_height(len(names)))
    known = top["value"].where(np.isfinite(top["value"]) & (top["value"] > 0))
    low, high = (known.min(), known.max()) if known.notna().any() else (1e-3, 1.0)
    edge, floor = high * 4, low / 2
    kept = (top["plan"] != "") | top["trained"].astype(str).str.startswith("must")
    beyond = np.isinf(top["value"])
    places = np.where(beyond, edge, known.fillna(floor))
    for mask, name, colour, symbol in (
        (beyond, "leaves the range: infinite", PURPLE, "star"),
        (~beyond & kept, "stays in FP32", VERMILION, "circle"),
        (~beyond & ~kept, "may be narrow", BLUE, "circle-open"),
    ):
        rows = np.flatnonzero(mask)
        if rows.size == 0:
            continue
        fig.add_bar(
            x=places[rows] - floor,
            base=floor,
            y=rows,
            orientation="h",
            width=0.12,
            marker={"color": colour, "opacity": 0.5},
            showlegend=False,
            hoverinfo="skip",
        )
        fig.add_scatter(
            x=places[rows],
            y=rows,
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
            customdata=[_words(names[i], top.loc[i].to_dict(), value) for i in rows],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    layer_axis(fig, names, 40)
    decades = range(math.floor(math.log10(floor)), math.ceil(math.log10(edge)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    fig.update_xaxes(
        type="log",
        title=value,
        range=[math.log10(floor), math.log10((edge if beyond.any() else high) * 1.5)],
        tickmode="array",
        tickvals=[m * 10.0**e for e in decades for m in steps],
        ticktext=[f"{m}e{e}" for e in decades for m in steps],
    )
    return fig


def _words(name: str, row: Mapping[Any, Any], value: str) -> str:
    """What stands under the pointer."""
    number = float(str(row["value"]))
    lines = [
        f"<b>{in_figure(name)}</b>",
        in_figure(str(row["line"])) if row["line"] else "",
        f"{value}: {number:.3g}" if math.isfinite(number) else "a value leaves the range",
        f"by training: {row['trained']}" if row["trained"] else "",
        in_figure(str(row["plan"])) if row["plan"] else "",
    ]
    return "<br>".join(line for line in lines if line)
