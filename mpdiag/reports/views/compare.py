"""Two runs beside each other, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mpdiag.display.colors import BLUE, GREY, ORANGE
from mpdiag.display.wording import KIND_NAMES, in_figure
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.plotting import empty, exponent_axis, figure, layer_axis, row_height

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mpdiag.analysis.layers import Layers
    from mpdiag.runs.schema import Kind

_MEASURES = ["absmax", "underflow", "overflow"]


def comparison_frame(a: Layers, b: Layers) -> pd.DataFrame:
    """Layers that both runs have.

    Returns:
        ``kind``, ``name``; ``absmax_a``, ``absmax_b``, ``underflow_a`` … (shares in FP16 at scale
        1); ``octaves``: log2 of b's |x|max over a's. Most moved first.
    """
    columns = ["kind", "name", *_MEASURES]
    sides = [
        pd.DataFrame(layers.to_json(), columns=[*columns, "numel"])[columns] for layers in (a, b)
    ]
    frame = sides[0].merge(sides[1], on=["kind", "name"], suffixes=("_a", "_b"))
    known = (frame["absmax_a"] > 0) & (frame["absmax_b"] > 0)
    ratio = (frame["absmax_b"] / frame["absmax_a"].where(known)).astype(float)
    frame["octaves"] = np.log2(ratio)
    order = frame["octaves"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def apart(a: Layers, b: Layers) -> tuple[int, int]:
    """How many layers only one of the runs has: of a, of b."""
    keys = [set(zip(x.kinds, x.names, strict=True)) for x in (a, b)]
    return len(keys[0] - keys[1]), len(keys[1] - keys[0])


def side_by_side_figure(
    frame: pd.DataFrame, a: str, b: str, measure: str = "absmax", most: int = 40
) -> go.Figure:
    """Layers of two runs (``comparison_frame``): a dot for each run, a line between them.

    Args:
        frame: The table, of one kind.
        a: What to call the first run.
        b: What to call the second.
        measure: ``absmax`` (log2), ``underflow`` or ``overflow`` (shares).
        most: Layers shown, the first of the table.
    """
    if frame.empty:
        return empty("the two runs have no layer of this kind in common")
    part = frame.head(most)
    names = [str(name) for name in part["name"]]
    left, right = (_values(part[f"{measure}_{side}"], measure) for side in "ab")
    fig = figure(row_height(len(names)))
    places = np.arange(len(names))
    gaps = np.full(len(names), np.nan)
    fig.add_scatter(
        x=np.stack([left, right, gaps], 1).ravel(),
        y=np.stack([places, places, gaps], 1).ravel(),
        mode="lines",
        line={"color": GREY, "width": 2},
        showlegend=False,
        hoverinfo="skip",
    )
    value = "2^%{x:.1f}" if measure == "absmax" else "%{x:.2%}"
    for values, name, colour, symbol in ((left, a, BLUE, "circle"), (right, b, ORANGE, "diamond")):
        label = in_figure(name)
        fig.add_scatter(
            x=values,
            y=places,
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=[in_figure(n) for n in names],
            hovertemplate="%{customdata}: " + value + "<extra>" + label + "</extra>",
        )
    layer_axis(fig, names)
    if measure == "absmax":
        known = np.concatenate([left, right])
        known = known[np.isfinite(known)]
        if known.size:
            exponent_axis(
                fig, int(np.floor(known.min())) - 1, int(np.ceil(known.max())) + 1, "largest |x|"
            )
    else:
        fig.update_xaxes(tickformat=".1%", rangemode="tozero", title=f"{measure} in FP16")
    return fig.figure()


def _values(column: pd.Series[float], measure: str) -> np.ndarray:
    values = column.to_numpy(float)
    return np.log2(np.where(values > 0, values, np.nan)) if measure == "absmax" else values


def comparison_receipt(a: str, b: str, kind: str) -> str:
    """Receipt of ``comparison_frame``'s largest values."""
    return f"""\
import numpy as np
import pandas as pd

def largest(run):
    stats = pd.read_parquet(f"{{run}}/stats")
    stats = stats[(stats["kind"].astype(str) == {kind!r}) & (({kind!r} != "update") | ~stats["skipped"])]
    values = stats["absmax"] / stats["scale"]
    return values.groupby(stats["name"].astype(str)).max().rename("absmax").reset_index()

frame = largest({a!r}).merge(largest({b!r}), on="name", suffixes=("_a", "_b"))
frame["octaves"] = np.log2(frame["absmax_b"] / frame["absmax_a"])
"""


def side_by_side(
    a: str, b: str, sides: tuple[Layers, Layers], names: tuple[str, str], kind: Kind, measure: str
) -> Picture:
    """Two runs, layer by layer."""
    frame = comparison_frame(sides[0].of_kind(kind), sides[1].of_kind(kind))
    title = {"absmax": "Largest |x|", "underflow": "Lost to 0", "overflow": "Overflow"}[measure]
    return Picture(
        "side-by-side",
        f"{title}: {KIND_NAMES[kind]} of {names[0]} and {names[1]}",
        "Most moved first, over all recorded steps. Shares are FP16's without a loss scale.",
        side_by_side_figure(frame, *names, measure),
        frame,
        comparison_receipt(a, b, kind),
    )


VIEW = View("compare", "Compare", "compare_arrows")
