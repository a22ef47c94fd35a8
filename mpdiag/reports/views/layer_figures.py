"""Figures of layers over the steps, of the module tree, and of one layer from step to step."""

import json
import math
from collections.abc import Sequence
from string import Template
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.display import svg
from mpdiag.display.colors import (
    BLUE,
    FATE_COLORS,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    VERMILION,
    rgba,
)
from mpdiag.display.wording import in_figure, layer_name, magnitude, percent
from mpdiag.numerics.formats import FloatFormat
from mpdiag.reports import plotting
from mpdiag.reports.views.gradients import figure
from mpdiag.reports.views.layer_tables import evenly

WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"
RIDGES = 24
"""Ridges in one figure, at most: more would cover each other."""
SEEN = 1e-3
"""Share of a step's values from which a power of two is worth its place."""
FRAMES = 60
"""Steps of the film, at most: the browser holds them all."""
_LEAST, _MOST = 1e-4, 1.0
"""Shares from the palest to the full colour of the module tree."""
_DARK = 0.1
"""Share from which a colour of the module tree asks for light words."""
_TINTS = (("#dbe9f5", 0.0), ("#f3b562", 0.5), ("#b84a00", 1.0))


def tree_figure(frame: pd.DataFrame) -> go.Figure:
    """The module tree (``tree_frame``): an area is a number of layers, a colour a share lost."""
    if frame.empty:
        return plotting.empty("no layers")
    shares = frame["sum_share"].to_numpy(float)
    labels = [in_figure(label or layer_name("")) for label in frame["label"]]
    said = ["" if math.isnan(s) else percent(float(s)) for s in shares]
    root = frame["layer"] == ""
    fig = plotting.figure(380, margin={"l": 4, "r": 4, "t": 4, "b": 4})
    fig.add_treemap(
        ids=[layer_name(str(name)) for name in frame["layer"]],
        labels=labels,
        parents=[
            "" if top else layer_name(str(p)) for p, top in zip(frame["parent"], root, strict=True)
        ],
        values=frame["leaves"],
        branchvalues="total",
        text=said,
        texttemplate="%{label}<br>%{text}",
        hovertext=[
            f"{in_figure(str(name))}<br>"
            + (f"loses {words} of its sum" if words else "not recorded")
            for name, words in zip(frame["layer"], said, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        marker={
            "colors": [_tint(share) for share in shares],
            "line": {"width": 1, "color": GREY},
        },
        textfont={"color": ["white" if share > _DARK else WORDS_INK for share in shares]},
        tiling={"pad": 2},
        pathbar={"visible": True, "thickness": 22},
    )
    bar = {
        "tickvals": [-4, -3, -2, -1, 0],
        "ticktext": ["≤ 0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
        "thickness": 12,
    }
    scale = {"colorscale": [[place, colour] for colour, place in _TINTS], "showscale": True}
    scale |= {"cmin": math.log10(_LEAST), "cmax": math.log10(_MOST), "colorbar": bar}
    fig.add_scatter(
        x=[None], y=[None], marker={"color": [0.0], **scale}, mode="markers", showlegend=False
    )
    return fig.update_xaxes(visible=False).update_yaxes(visible=False).figure()


def _tint(share: float) -> str:
    """The colour of a share of the module tree; grey where it is not known."""
    if math.isnan(share):
        return "#d5d9df"
    place = math.log10(min(max(share, _LEAST), _MOST)) / -math.log10(_LEAST) + 1
    low, high = (_TINTS[0], _TINTS[1]) if place < _TINTS[1][1] else (_TINTS[1], _TINTS[2])
    part = (place - low[1]) / (high[1] - low[1])
    mixed = [
        round(int(low[0][i : i + 2], 16) * (1 - part) + int(high[0][i : i + 2], 16) * part)
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def course_figure(
    frame: pd.DataFrame, updates: pd.DataFrame, fmt: FloatFormat, scale: str
) -> go.Figure:
    """What one layer loses, its largest value and its updates, at each recorded step.

    Args:
        frame: ``layer_course_frame``.
        updates: ``layer_updates_frame``; may be empty.
        fmt: The format.
        scale: The selected scale, as a phrase.
    """
    if frame.empty:
        return plotting.empty("not recorded in any step")
    rows = 3 if len(updates) else 2
    fig = plotting.figure(170 * rows + 50, hovermode="x")
    lines = [
        ("sum_share", f"sum lost in {fmt.label}, without a loss scale", VERMILION, "solid"),
        ("lost_share", f"values lost in {fmt.label}, without a loss scale", ORANGE, "dot"),
    ]
    if not np.allclose(frame["sum_share"], frame["sum_share_scaled"]):
        lines.append(("sum_share_scaled", f"sum lost in {fmt.label}, {scale}", GREEN, "dash"))
    for column, name, colour, dash in lines:
        _line(fig, frame["step"], frame[column], name, colour, "y", dash)
    with np.errstate(divide="ignore"):
        largest = np.log2(frame["absmax"].to_numpy(float))
    largest = np.where(np.isfinite(largest), largest, np.nan)
    _line(fig, frame["step"], largest, "largest |x|", BLUE, "y2")
    if len(updates):
        words = "|Δw| / |w| of its parameters"
        _line(fig, updates["step"], updates["update_ratio"], words, PURPLE, "y3")
    gap, height = 0.07, (1 - 0.07 * (rows - 1)) / rows
    base: dict[str, Any] = fig.layout["yaxis"]
    titles = ("lost", "largest |x|", "|Δw| / |w|")
    for i in range(rows):
        top = 1 - i * (height + gap)
        domain = [max(0.0, top - height), top]
        fig.layout["yaxis" if i == 0 else f"yaxis{i + 1}"] = base | {
            "domain": domain,
            "title": titles[i],
            "anchor": "x",
            "nticks": 5,
            **({"tickformat": ".2~%", "rangemode": "tozero"} if i == 0 else _POWERS),
        }
    fig.update_xaxes(title="step", anchor=f"y{rows}")
    return fig.figure()


_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}
"""An axis of log2, labelled as powers of two."""


def _line(
    fig: plotting.Drawing, x: Any, y: Any, name: str, colour: str, axis: str, dash: str = "solid"
) -> None:
    hover = "%{y:.2%}" if axis == "y" else "2^%{y:.1f}"
    dots = {"marker": {"size": 4}, "yaxis": axis}
    fig.dotted_line(x, y, name, colour, hover, width=2, dash=dash, **dots)


def movement_figure(frame: pd.DataFrame, most: int = 20) -> go.Figure:
    """The layers that moved most at a step (``movement_frame``), a bar each."""
    worst = frame.head(most)
    if worst.empty:
        return plotting.empty("nothing was recorded before this step to compare with")
    names = [str(name) for name in worst["layer"]]
    fig = plotting.figure(plotting.row_height(len(names)), hovermode="closest")
    shift = worst["shift"].to_numpy(float)
    said = [
        f"{in_figure(name)}<br>largest |x|: {magnitude(before)} → {magnitude(now)}"
        for name, before, now in zip(names, worst["absmax_before"], worst["absmax"], strict=True)
    ]
    for mask, words, colour in (
        (shift >= 0, "larger than before", VERMILION),
        (shift < 0, "smaller than before", BLUE),
    ):
        if mask.any():
            fig.add_bar(
                x=shift[mask],
                y=np.flatnonzero(mask),
                orientation="h",
                name=words,
                marker={"color": colour},
                unselected={"marker": {"opacity": 1}},
                customdata=[name for name, one in zip(names, mask, strict=True) if one],
                hovertext=[text for text, one in zip(said, mask, strict=True) if one],
                hovertemplate="%{hovertext}<br>moved by %{x:+.2f} powers of two"
                "<br><i>click: the page of this layer</i><extra></extra>",
            )
    plotting.layer_axis(fig, names)
    fig.add_vline(0, line={"color": plotting.GRID, "width": 2})
    fig.update_xaxes(title="shift of the mean exponent, in powers of two", fixedrange=True)
    fig.update_yaxes(fixedrange=True)
    return fig.update_layout(dragmode=False, clickmode="event+select").figure()


def loss_figure(
    steps: Any, losses: Any, recorded: Any, step: int | None, rises: pd.DataFrame
) -> go.Figure:
    """The loss of the recording, a point each, to be clicked.

    Args:
        steps: Of the log.
        losses: At each of them.
        recorded: Which of the steps have recorded gradients, a mask.
        step: The selected step.
        rises: ``loss_rises``.
    """
    fig = plotting.figure(260, hovermode="closest")
    hover = "step %{x}: %{y:.5g}<br><i>click: what moved at this step</i><extra></extra>"
    fig.add_scatter(
        x=steps,
        y=losses,
        name="loss",
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        marker={"size": np.where(recorded, 7, 4), "color": BLUE},
        unselected={"marker": {"opacity": 1}},
        hovertemplate=hover,
    )
    if len(rises):
        fig.add_scatter(
            x=rises["step"],
            y=rises["loss"],
            name="largest rises",
            mode="markers",
            marker={"color": VERMILION, "symbol": "triangle-up", "size": 12},
            unselected={"marker": {"opacity": 1}},
            hovertemplate=hover,
        )
    if step is not None:
        fig.add_vline(step, line={"color": FATE_COLORS["overflow"], "width": 2, "dash": "dash"})
    fig.update_xaxes(title="step", fixedrange=True)
    fig.update_yaxes(title="loss", fixedrange=True)
    known = np.asarray(losses, float)
    if known.size and np.nanmin(known) > 0 and np.nanmax(known) > 20 * np.nanmin(known):
        fig.update_yaxes(type="log")
        plotting.log10_axis(fig, known)
    return fig.update_layout(dragmode=False, clickmode="event+select").figure()


_NOTHING = "no non-zero values in any recorded step"


def over_time(frame: pd.DataFrame, held: svg.Range, *, log: bool) -> go.Figure:
    """Steps × exponents of one layer (``time_frame``), values upward, with the format's window."""
    if frame.empty:
        return plotting.empty(_NOTHING)
    low, high = figure.exponents_shown(frame, held)
    steps = sorted(frame["step"].unique())
    counts = figure.matrix(frame, "step", steps, low, high)
    labels = np.repeat([[str(s) for s in steps]], counts.shape[1], axis=0)
    fig = plotting.figure(440, hovermode="closest")
    hover = "step %{text}<br>from 2^%{y:.0f}: %{customdata:,} values"
    cells = {"y": np.arange(low, high) + 0.5, "customdata": counts.T, "text": labels}
    fates = figure.fates_of(counts, low, held)
    for name, part in figure.shades(counts, fates, log=log):
        said = f"{hover}<extra>{figure.FATE_WORDS[name]}</extra>"
        figure.add_cells(fig, name, counts, part, z=part.T, hovertemplate=said, **cells)
    places = list(range(0, len(steps), max(1, len(steps) // 10)))
    plotting.exponent_axis(fig, low, high, figure.VALUES)
    fig.update_yaxes(**fig.layout["xaxis"])
    fig.layout["xaxis"] = {
        "title": "recorded step",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [str(steps[i]) for i in places],
        "gridcolor": plotting.GRID,
        "range": [-0.5, len(steps) - 0.5],
    }
    for place, words, colour in (
        (held.zero, "↓ 0", VERMILION),
        (held.normal, "↓ subnormal", GREY),
        (held.top, "↑ ∞", PURPLE),
    ):
        if low < place < high:
            font = {"size": 12, "color": WORDS_INK}
            label = {"text": words, "font": font, "bgcolor": WORDS_GROUND}
            fig.add_hline(place, label, line={"color": colour, "width": 1.5, "dash": "dot"})
    return fig.figure()


def ridges(frame: pd.DataFrame, held: svg.Range) -> go.Figure:
    """The histogram of a layer at steps (``time_frame``) one behind another, the latest in front.

    Each ridge is the share of the step's values in each power of two, on one scale for all.
    """
    if frame.empty:
        return plotting.empty(_NOTHING)
    steps = evenly(sorted(int(s) for s in frame["step"].unique()), RIDGES)
    low, high = _exponents(frame)
    fig = plotting.figure(440, hovermode="closest", showlegend=False)
    shares = {step: _shares(frame, step, low, high) for step in steps}
    lift = 3.6 / max(float(part.max()) for part in shares.values())
    x = np.arange(low, high) + 0.5
    # The first step is farthest away, at the top; each is drawn before what stands in front of it.
    for place, step in enumerate(steps):
        base = float(len(steps) - 1 - place)
        strength = 0.25 + 0.6 * place / max(1, len(steps) - 1)
        fig.add_scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([base + lift * shares[step], np.full(len(x), base)]),
            mode="lines",
            fill="toself",
            fillcolor=rgba(BLUE, round(strength, 2)),
            line={"color": plotting.LINE, "width": 1},
            name=f"step {step}",
            hoveron="fills",
            hoverinfo="name",
        )
    every = max(1, -(-len(steps) // 12))
    ticks = range(0, len(steps), every)
    plotting.exponent_axis(fig, low, high, figure.VALUES)
    fig.update_yaxes(
        title="recorded step",
        tickmode="array",
        tickvals=[len(steps) - 1 - i for i in ticks],
        ticktext=[str(steps[i]) for i in ticks],
        range=[-0.4, len(steps) + 2.8],
        showgrid=False,
    )
    figure.add_window(fig, held, low, high)
    return fig.figure()


def _exponents(frame: pd.DataFrame) -> tuple[int, int]:
    """The exponents shown: those with enough values in some step to be seen."""
    whole = frame.groupby("step")["count"].transform("sum")
    seen = frame.loc[frame["count"] >= SEEN * whole, "exponent"]
    return int(seen.min()) - 2, int(seen.max()) + 3


def _shares(frame: pd.DataFrame, step: int, low: int, high: int) -> np.ndarray:
    part = frame[frame["step"] == step]
    whole = float(part["count"].sum())
    part = part[part["exponent"].between(low, high - 1)]
    shares: np.ndarray = np.zeros(high - low)
    shares[part["exponent"].to_numpy() - low] = part["count"].to_numpy() / max(1.0, whole)
    return shares


def film(frame: pd.DataFrame, held: svg.Range) -> go.Figure:
    """The histogram of a layer at one step (``time_frame``), with a slider over the steps and play.

    The browser has all steps at once, so that it plays without asking for any.
    """
    if frame.empty:
        return plotting.empty(_NOTHING)
    steps = evenly(sorted(int(s) for s in frame["step"].unique()), FRAMES)
    low, high = _exponents(frame)
    shares = np.array([_shares(frame, step, low, high) for step in steps])
    fates = _fates(frame, steps, held, low, high)
    shown = [name for name in svg.FATES if ((fates == name) & (shares > 0)).any()]
    parts = {name: np.where(fates == name, shares, 0.0) for name in shown}
    fig = plotting.figure(430, barmode="overlay")
    for name in shown:
        fig.add_bar(
            x=np.arange(low, high) + 0.5,
            y=parts[name][-1],
            width=0.94,
            name=figure.FATE_WORDS[name],
            marker={"color": rgba(FATE_COLORS[name], PALE.get(name, 1.0))},
            customdata=np.arange(low, high),
            hovertemplate="2^%{customdata}: %{y:.2%}<extra>" + figure.FATE_WORDS[name] + "</extra>",
        )
    frames = [
        {"name": str(step), "data": [{"y": parts[name][i]} for name in shown]}
        for i, step in enumerate(steps)
    ]
    top = float(shares.max())
    plotting.exponent_axis(fig, low, high, figure.VALUES)
    fig.update_yaxes(
        title="share of the values", tickformat=".0%", range=[0, 1.05 * top], fixedrange=True
    )
    fig.update_xaxes(fixedrange=True)
    figure.add_window(fig, held, low, high)
    words = _film_words(frame[frame["step"].isin(steps)], held)
    fig.update_layout(
        dragmode=False,
        margin={"b": 162, "autoexpand": False, "l": 60},
        **_controls(words),
    )
    return fig.figure(frames)


def _fates(
    frame: pd.DataFrame, steps: Sequence[int], held: svg.Range, low: int, high: int
) -> np.ndarray:
    """What becomes of the values of each step from ``low`` to ``high``, judged by all of them."""
    first = min(low, int(frame["exponent"].min()))
    end = max(high, int(frame["exponent"].max()) + 1)
    counts = figure.matrix(frame, "step", steps, first, end)
    return figure.fates_of(counts, first, held)[:, low - first : high - first]


def _film_words(frame: pd.DataFrame, held: svg.Range) -> dict[int, str]:
    """What becomes of the values of each step, those in the tails that are not drawn included."""
    known = {int(e): held.fate(int(e)) for e in frame["exponent"].unique()}
    counts = (
        frame.groupby(["step", frame["exponent"].map(known)])["count"].sum().unstack(fill_value=0)
    )
    shares = counts.div(counts.sum(axis=1), axis=0)
    words = {}
    for step, part in zip(shares.index, shares.to_dict("records"), strict=True):
        said = [
            f"{spoken}: {percent(part[name])}"
            for name, spoken in figure.FATE_WORDS.items()
            if part.get(name) and name in ("lost", "overflow")
        ]
        words[int(step)] = f"step {step:,}" + (" · " if said else "") + ", ".join(said)
    return words


def _controls(words: dict[int, str]) -> dict[str, Any]:
    """The play button and the slider; the words of a step stand above the slider."""
    text = Template(plotting.FILM)
    layout: dict[str, Any] = json.loads(text.substitute(line=plotting.LINE, grey=GREY))
    at_once = layout["updatemenus"][0]["buttons"][1]["args"][1]  # as the pause has it
    steps = [
        {"method": "animate", "label": said, "args": [[str(step)], at_once]}
        for step, said in words.items()
    ]
    # A label of each step would not fit below the slider: there they are clear.
    layout["sliders"][0] = {"active": len(words) - 1, "steps": steps, **layout["sliders"][0]}
    return layout
