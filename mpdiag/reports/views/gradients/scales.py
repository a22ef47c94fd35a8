"""Each layer at every loss scale: what it loses, where it overflows, and what a larger scale gains.

The shares are those that the analyzer chooses the scale by (``analysis.scaling.necessity``), the bits
lost those of its rounding errors: a picture and a plan that rest on one table cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mpdiag.analysis.layers import share
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.analysis.scaling.necessity import LARGEST_EXPONENT, MATTERS, NEGLIGIBLE, lost_by_scale
from mpdiag.display.colors import BLUE, FATE_COLORS, GREEN, ORANGE, VERMILION
from mpdiag.display.wording import in_figure, percent, scale_text, spoken_layer, superscript
from mpdiag.reports.plotting import (
    MARK,
    SELECTED,
    empty,
    exponent_axis,
    figure,
    layer_axis,
    row_height,
)
from mpdiag.reports.views.gradients.figure import fixed_rows
from mpdiag.reports.views.gradients.frame import SCALES, recommended_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from mpdiag.analysis.layers import Layers
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.plan import LossScalePlan
    from mpdiag.reports.plotting import Drawing

_CLASSES = (
    ("matters", f"> {100 * MATTERS:g} % lost", VERMILION, 1.0),
    ("little", f"> {100 * NEGLIGIBLE:g} %", ORANGE, 0.75),
    ("kept", "less", BLUE, 0.42),
    ("overflows", "overflows", FATE_COLORS["overflow"], 1.0),
)


def layer_scales_frame(
    layers: Layers, fmt: FloatFormat, whole: Layers | None = None
) -> pd.DataFrame:
    """What a format makes of each layer at every loss scale.

    Args:
        layers: Histograms of the steps whose losses count.
        fmt: The format.
        whole: Those of all recorded steps, in any of which a layer may overflow; by default ``layers``.

    Returns:
        A row for each layer and ``scale_exponent``, the layers in their order: ``lost_share`` of the
        non-zero values; ``sum_share`` of Σ|x|, an estimate; ``rounding_error``, relative, an estimate,
        infinite where a value overflows in these steps; ``overflows``.
    """
    h, n = layers.histograms, len(layers)
    everything = layers if whole is None else whole
    place = {str(name): i for i, name in enumerate(everything.names)}
    rows = [place[str(name)] for name in layers.names]
    columns: dict[str, list[np.ndarray]] = {"lost_share": [], "rounding_error": [], "overflows": []}
    for exponent in SCALES:
        columns["lost_share"].append(share(h.lost_to_zero(fmt, exponent).value, h.nonzero))
        columns["rounding_error"].append(rounding_error(h, fmt, exponent))
        over = everything.histograms.overflow(fmt, exponent).lower[rows]
        columns["overflows"].append(over > 0)
    sums = lost_by_scale(layers, fmt, SCALES[0])[:, : len(SCALES)]
    frame = pd.DataFrame(
        {
            "layer": np.repeat(layers.names.astype(object), len(SCALES)),
            "scale_exponent": np.tile(np.array(SCALES), n),
            "sum_share": sums.reshape(-1),
        }
    )
    for name, values in columns.items():
        frame[name] = np.stack(values, axis=1).reshape(-1) if n else []
    return frame


def layer_scales(
    frame: pd.DataFrame,
    layers: Sequence[str],
    exponent: int,
    scale: LossScalePlan | None,
    *,
    height: int | None = None,
    names: bool = True,
) -> go.Figure:
    """Layers × loss scales, by what is lost (``layer_scales_frame``).

    Args:
        frame: The table.
        layers: Order of the rows, top first.
        exponent: log2 of the selected scale.
        scale: The plan's, if it speaks of these tensors.
        height: In pixels; by default as many as the rows ask for.
        names: Whether rows are labelled.
    """
    if frame.empty:
        return empty("no layers")
    first, recommended = _beginning(exponent, scale)
    shown = range(first, LARGEST_EXPONENT + 1)
    fig = figure(height or row_height(len(layers)), hovermode="closest")
    sums, lost, over = (
        _table(frame, column) for column in ("sum_share", "lost_share", "overflows")
    )
    here = slice(first - SCALES[0], None)
    classes = _classes(sums, over.astype(bool))[:, here]
    known = [key for key, *_ in _CLASSES]
    fig.add_heatmap(
        x=list(shown),
        z=np.select([classes == key for key in known], range(len(known))),
        zmin=-0.5,
        zmax=len(known) - 0.5,
        colorscale=_steps(),
        showscale=False,
        xgap=1,
        ygap=1,
        text=np.repeat([[in_figure(name)] for name in layers], len(shown), axis=1),
        customdata=np.stack([part[:, here] for part in (sums, lost)], axis=-1),
        hovertemplate="%{text}<br>at 2^%{x}: loses %{customdata[0]:.2%} of its sum, "
        "%{customdata[1]:.2%} of its values<extra></extra>",
    )
    for key, words, colour, opacity in _CLASSES:
        if (classes == key).any():
            marker = {"color": colour, "symbol": "square", "size": 11, "opacity": opacity}
            fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=words)
    layer_axis(fig, layers)
    fig.update_yaxes(showticklabels=names)
    exponent_axis(fig, first, LARGEST_EXPONENT, "loss scale")
    fig.update_xaxes(range=[first - 0.5, LARGEST_EXPONENT + 0.5], showgrid=False)
    _marks(fig, exponent, recommended, scale)
    if height is not None:
        fixed_rows(fig, layers, labels=names)
    return fig.figure()


def _steps() -> list[list[object]]:
    """A colour scale of one step for each class."""
    found: list[list[object]] = []
    for i, (_, _, colour, opacity) in enumerate(_CLASSES):
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        tint = f"rgba({red}, {green}, {blue}, {opacity})"
        found += [[i / len(_CLASSES), tint], [(i + 1) / len(_CLASSES), tint]]
    return found


def _beginning(exponent: int, scale: LossScalePlan | None) -> tuple[int, int | None]:
    """The smallest scale shown, and the recommended one, as exponents."""
    if scale is None:
        return max(SCALES[0], min(0, exponent) - 1), None
    recommended, lower = int(np.log2(scale.recommended)), int(np.log2(scale.lower))
    return max(SCALES[0], min(0, exponent, recommended, lower) - 1), recommended


def _table(frame: pd.DataFrame, column: str) -> np.ndarray:
    values: np.ndarray = frame[column].to_numpy().reshape(-1, len(SCALES))
    return values


def _classes(sums: np.ndarray, over: np.ndarray) -> np.ndarray:
    named = np.where(sums > MATTERS, "matters", np.where(sums > NEGLIGIBLE, "little", "kept"))
    return np.where(over, "overflows", named)


def _marks(
    fig: Drawing, exponent: int, recommended: int | None, scale: LossScalePlan | None
) -> None:
    """The plan's interval and scale, and the selected scale, with their words above."""
    fig.update_layout(margin={"t": 12 + 2 * MARK})
    if scale is not None and recommended is not None:
        low, high = recommended_interval(scale)
        if low <= high:
            ends = {"x0": low - 0.5, "x1": min(high, LARGEST_EXPONENT) + 0.5}
            line = {"color": GREEN, "width": 2, "dash": "dot"}
            fig.add_shape(type="rect", **ends, y0=0, y1=1, yref="paper", line=line)
        _beyond(fig, int(high) if np.isfinite(high) else LARGEST_EXPONENT, scale)
        _mark(fig, recommended, f"plan 2{superscript(recommended)}", GREEN, "dash", 0)
    _mark(fig, exponent, f"selected 2{superscript(exponent)}", VERMILION, "solid", 1, SELECTED)


def _beyond(fig: Drawing, high: int, scale: LossScalePlan) -> None:
    """The scales above the interval, where some gradient overflows, of these layers or not."""
    if high >= LARGEST_EXPONENT:
        return
    colour, limiting = FATE_COLORS["overflow"], scale.evidence.get("absmax_layer")
    fig.add_vrect(high + 0.5, LARGEST_EXPONENT + 0.5, fillcolor=colour, opacity=0.35, line_width=0)
    whose = in_figure(str(limiting), 16) if limiting else "a gradient"
    marker = {"color": colour, "symbol": "square", "size": 11, "opacity": 0.35}
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=f"∞: {whose}")


def _mark(
    fig: Drawing, place: int, words: str, colour: str, dash: str, line: int, name: str | None = None
) -> None:
    fig.add_vline(place, line={"color": colour, "width": 2, "dash": dash}, name=name)
    fig.add_annotation(
        name=name,
        x=place,
        y=1,
        yref="paper",
        yanchor="bottom",
        yshift=MARK * line,
        # A wide word at an edge would be cut off.
        xanchor="left" if place < 4 else "right" if place > 18 else "center",
        text=words,
        showarrow=False,
        font={"size": 12, "color": colour},
    )


def scales_words(
    frame: pd.DataFrame, fmt: FloatFormat, exponent: int, scale: LossScalePlan, when: str
) -> str:
    """Why the plan takes its scale and no larger one, in figures of the table.

    Args:
        frame: ``layer_scales_frame``.
        fmt: The format.
        exponent: log2 of the selected scale.
        scale: The plan's.
        when: The steps, as a phrase.
    """
    recommended = int(np.log2(scale.recommended))
    worst, lost, rounding = _worst(frame, recommended)
    text = (
        f"The losses are {when}. At {scale_text(scale.recommended)}, which the plan takes, "
        f"{spoken_layer(worst)} loses most, {percent(lost)} of its sum"
    )
    if np.isfinite(rounding):
        text += (
            f"; rounding, bits lost included, moves no layer's gradients by more than "
            f"{percent(rounding)} of their norm (estimated)"
        )
    text += "."
    _, high = recommended_interval(scale)
    if np.isfinite(high) and recommended < high <= SCALES[-1]:
        top = int(high)
        _, least, finest = _worst(frame, top)
        finer = f" and {percent(finest)}" if np.isfinite(rounding) and np.isfinite(finest) else ""
        text += (
            f" At {scale_text(2.0**top)}, the largest scale without overflow, these are "
            f"{percent(least)}{finer}, and gradients may grow less than 2 times before "
            f"{fmt.label} overflows; at {scale_text(scale.recommended)} they may grow "
            f"{2 ** (top - recommended):,} times."
        )
    if exponent != recommended:
        worst, lost, _ = _worst(frame, exponent)
        text += (
            f" At the selected {scale_text(2.0**exponent)} {spoken_layer(worst)} loses "
            f"{percent(lost)} of its sum."
        )
    return text


def _worst(frame: pd.DataFrame, exponent: int) -> tuple[str, float, float]:
    """The layer that loses most of its sum at a scale, how much, and the largest rounding error."""
    part = frame[frame["scale_exponent"] == exponent]
    at = int(part["sum_share"].to_numpy().argmax())
    error = float(part["rounding_error"].max())
    return str(part["layer"].iloc[at]), float(part["sum_share"].iloc[at]), error
