"""What is lost at every loss scale, by layer and altogether, and what a larger scale would gain."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.scaling.necessity import LARGEST_EXPONENT, MATTERS, NEGLIGIBLE
from mpdiag.display.colors import BLUE, FATE_COLORS, GREEN, ORANGE, VERMILION, rgba
from mpdiag.display.wording import in_figure, percent, scale_text, spoken_layer, superscript
from mpdiag.numerics.formats import FloatFormat
from mpdiag.plan import LossScalePlan
from mpdiag.reports import plotting
from mpdiag.reports.views.gradients.figure import fixed_rows
from mpdiag.reports.views.gradients.frame import SCALES, recommended_interval

_CLASSES = (
    ("matters", f"> {100 * MATTERS:g} % lost", VERMILION, 1.0),
    ("little", f"> {100 * NEGLIGIBLE:g} %", ORANGE, 0.75),
    ("kept", f"≤ {100 * NEGLIGIBLE:g} %", BLUE, 0.42),
    ("overflows", "overflows", FATE_COLORS["overflow"], 1.0),
)


def layer_scales(
    frame: pd.DataFrame,
    layers: Sequence[str],
    exponent: int,
    scale: LossScalePlan | None,
    *,
    height: int | None,
) -> go.Figure:
    """Layers × loss scales, by what is lost (``layer_scales_frame``).

    Args:
        frame: The table.
        layers: Order of the rows, top first.
        exponent: log2 of the selected scale.
        scale: The plan's, if it speaks of these tensors.
        height: In pixels; None for as many as the rows ask for.
    """
    if frame.empty:
        return plotting.empty("no layers")
    ends = [] if scale is None else [int(np.log2(s)) for s in (scale.recommended, scale.lower)]
    first = max(SCALES[0], min(0, exponent, *ends) - 1)
    shown = range(first, LARGEST_EXPONENT + 1)
    fig = plotting.figure(height or plotting.row_height(len(layers)), hovermode="closest")
    sums, lost, over = (
        frame[column].to_numpy().reshape(-1, len(SCALES))[:, first - SCALES[0] :]
        for column in ("sum_share", "lost_share", "overflows")
    )
    named = np.where(sums > MATTERS, "matters", np.where(sums > NEGLIGIBLE, "little", "kept"))
    classes = np.where(over.astype(bool), "overflows", named)
    if scale is not None:  # no other cell under the shade of what the plan rules out
        beyond = np.array(shown) > recommended_interval(scale)[1]
        classes[(classes != "overflows") & beyond] = ""
    known = [key for key, *_ in _CLASSES]
    fig.add_heatmap(
        x=list(shown),
        z=np.select([classes == key for key in known], range(len(known)), np.nan),
        zmin=-0.5,
        zmax=len(known) - 0.5,
        colorscale=_steps(),
        showscale=False,
        xgap=1,
        ygap=1,
        text=np.repeat([[in_figure(name)] for name in layers], len(shown), axis=1),
        customdata=np.stack([sums, lost], axis=-1),
        hovertemplate="%{text}<br>at 2^%{x}: loses %{customdata[0]:.2%} of its sum, "
        "%{customdata[1]:.2%} of its values<extra></extra>",
    )
    for key, words, colour, opacity in _CLASSES:
        if (classes == key).any():
            fig.key(words, colour, opacity)
    plotting.layer_axis(fig, layers)
    # Below them its legend has four lines on a phone: no room for words at the axis.
    plotting.exponent_axis(fig, first, LARGEST_EXPONENT, None)
    fig.update_xaxes(range=[first - 0.5, LARGEST_EXPONENT + 0.5], showgrid=False)
    fig.update_layout(margin={"t": 12 + 2 * plotting.MARK}, showlegend=True)
    if scale is not None:
        _planned(fig, scale)
    _mark(fig, exponent, f"selected 2{superscript(exponent)}", VERMILION, "solid", 1)
    if height is not None:
        fixed_rows(fig, layers)
    return fig


def _steps() -> list[list[object]]:
    """A colour scale of one step for each class."""
    found: list[list[object]] = []
    for i, (_, _, colour, opacity) in enumerate(_CLASSES):
        tint = rgba(colour, opacity)
        found += [[i / len(_CLASSES), tint], [(i + 1) / len(_CLASSES), tint]]
    return found


def _planned(fig: plotting.Drawing, scale: LossScalePlan) -> None:
    """The plan's scale, its interval, and the scales above it, where some gradient overflows."""
    low, high = recommended_interval(scale)
    if low <= high:
        ends = {"x0": low - 0.5, "x1": min(high, LARGEST_EXPONENT) + 0.5}
        line = {"color": GREEN, "width": 2, "dash": "dot"}
        fig.add_shape(type="rect", **ends, y0=0, y1=1, yref="paper", line=line)
    if high < LARGEST_EXPONENT:
        colour, limiting = FATE_COLORS["overflow"], scale.evidence.get("absmax_layer")
        right = LARGEST_EXPONENT + 0.5
        fig.add_vrect(int(high) + 0.5, right, fillcolor=colour, opacity=0.35, line_width=0)
        whose = in_figure(str(limiting), 16) if limiting else "a gradient"
        fig.key(f"∞: {whose}", colour, 0.35)
    recommended = int(np.log2(scale.recommended))
    _mark(fig, recommended, f"plan 2{superscript(recommended)}", GREEN, "dash", 0)


def _mark(fig: plotting.Drawing, place: int, words: str, colour: str, dash: str, line: int) -> None:
    fig.add_vline(place, line={"color": colour, "width": 2, "dash": dash})
    # A wide word at an edge would be cut off.
    side = "left" if place < 4 else "right" if place > 18 else "center"
    plotting.words_above(fig, place, words, colour, side, line)


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
        f"At the plan's scale, {scale_text(scale.recommended)}, {spoken_layer(worst)} loses most: "
        f"{percent(lost)} of its gradient {when}."
    )
    if np.isfinite(rounding):
        text += (
            f" Rounding moves no layer by more than {percent(rounding)} of its norm (estimated)."
        )
    text = " ".join(filter(None, (text, room_words(scale, fmt))))
    if exponent != recommended:
        worst, lost, _ = _worst(frame, exponent)
        text += (
            f" At the selected {scale_text(2.0**exponent)} {spoken_layer(worst)} loses "
            f"{percent(lost)} of its gradient."
        )
    return text


def room_words(scale: LossScalePlan, fmt: FloatFormat) -> str:
    """Why the plan takes its scale and not the largest without overflow; "" where that is the same."""
    recommended, (_, high) = int(np.log2(scale.recommended)), recommended_interval(scale)
    if not recommended < high <= SCALES[-1]:
        return ""
    return (
        f"At {scale_text(scale.recommended)} gradients may grow {2 ** (int(high) - recommended):,} "
        f"times before {fmt.label} overflows; at {scale_text(2.0 ** int(high))}, the largest scale "
        "without overflow, less than 2 times."
    )


def _worst(frame: pd.DataFrame, exponent: int) -> tuple[str, float, float]:
    """The layer that loses most of its sum at a scale, how much, and the largest rounding error."""
    part = frame[frame["scale_exponent"] == exponent]
    at = int(part["sum_share"].to_numpy().argmax())
    error = float(part["rounding_error"].max())
    return str(part["layer"].iloc[at]), float(part["sum_share"].iloc[at]), error
