"""One layer's histogram from step to step: as cells, as ridges, and as a film with a slider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.display import svg
from mpdiag.display.colors import BLUE, FATE_COLORS, GREY, PURPLE, VERMILION
from mpdiag.display.wording import percent
from mpdiag.reports.plotting import GRID, LINE, empty, exponent_axis, figure
from mpdiag.reports.views.gradients.figure import (
    FATE_WORDS,
    VALUES,
    add_cells,
    add_window,
    exponents_shown,
    matrix,
    shades,
)
from mpdiag.reports.views.layers.frame import evenly

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"
RIDGES = 24
"""Ridges in one figure, at most: more would cover each other."""
SEEN = 1e-3
"""Share of a step's values from which a power of two is worth its place."""
FRAMES = 60
"""Steps of the film, at most: the browser holds them all."""


_NOTHING = "no non-zero values in any recorded step"


def over_time(frame: pd.DataFrame, held: svg.Range, *, log: bool) -> go.Figure:
    """Steps × exponents of one layer (``time_frame``), values upward, with the format's window."""
    if frame.empty:
        return empty(_NOTHING)
    low, high = exponents_shown(frame, held)
    steps = sorted(frame["step"].unique())
    counts = matrix(frame, "step", steps, low, high)
    labels = np.repeat([[str(s) for s in steps]], counts.shape[1], axis=0)
    fig = figure(440, hovermode="closest")
    hover = "step %{text}<br>from 2^%{y:.0f}: %{customdata:,} values"
    cells = {"y": np.arange(low, high) + 0.5, "customdata": counts.T, "text": labels}
    for name, part in shades(counts, low, held, log=log):
        said = f"{hover}<extra>{FATE_WORDS[name]}</extra>"
        add_cells(fig, name, counts, part, z=part.T, hovertemplate=said, **cells)
    places = list(range(0, len(steps), max(1, len(steps) // 10)))
    exponent_axis(fig, low, high, VALUES)
    fig.update_yaxes(**fig.layout["xaxis"])
    fig.layout["xaxis"] = {
        "title": "recorded step",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [str(steps[i]) for i in places],
        "gridcolor": GRID,
        "range": [-0.5, len(steps) - 0.5],
    }
    for place, words, colour in (
        (held.zero, "↓ 0", VERMILION),
        (held.normal, "↓ bits lost", VERMILION),
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
        return empty(_NOTHING)
    steps = evenly(sorted(int(s) for s in frame["step"].unique()), RIDGES)
    low, high = _exponents(frame)
    fig = figure(440, hovermode="closest", showlegend=False)
    shares = {step: _shares(frame, step, low, high) for step in steps}
    lift = 3.6 / max(float(part.max()) for part in shares.values())
    x = np.arange(low, high) + 0.5
    red, green, blue = (int(BLUE[i : i + 2], 16) for i in (1, 3, 5))
    # The first step is farthest away, at the top; each is drawn before what stands in front of it.
    for place, step in enumerate(steps):
        base = float(len(steps) - 1 - place)
        strength = 0.25 + 0.6 * place / max(1, len(steps) - 1)
        fig.add_scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([base + lift * shares[step], np.full(len(x), base)]),
            mode="lines",
            fill="toself",
            fillcolor=f"rgba({red}, {green}, {blue}, {strength:.2f})",
            line={"color": LINE, "width": 1},
            name=f"step {step}",
            hoveron="fills",
            hoverinfo="name",
        )
    every = max(1, -(-len(steps) // 12))
    ticks = range(0, len(steps), every)
    exponent_axis(fig, low, high, VALUES)
    fig.update_yaxes(
        title="recorded step",
        tickmode="array",
        tickvals=[len(steps) - 1 - i for i in ticks],
        ticktext=[str(steps[i]) for i in ticks],
        range=[-0.4, len(steps) + 2.8],
        showgrid=False,
    )
    add_window(fig, held, low, high)
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
        return empty(_NOTHING)
    steps = evenly(sorted(int(s) for s in frame["step"].unique()), FRAMES)
    low, high = _exponents(frame)
    fates = np.array([held.fate(e) for e in range(low, high)])
    shown = [name for name in svg.FATES if (fates == name).any()]
    shares = {step: _shares(frame, step, low, high) for step in steps}
    fig = figure(430, barmode="overlay")
    x = np.arange(low, high) + 0.5
    for name in shown:
        fig.add_bar(
            x=x[fates == name],
            y=shares[steps[-1]][fates == name],
            width=0.94,
            name=FATE_WORDS[name],
            marker={"color": FATE_COLORS[name]},
            customdata=np.flatnonzero(fates == name) + low,
            hovertemplate="2^%{customdata}: %{y:.2%}<extra>" + FATE_WORDS[name] + "</extra>",
        )
    frames = [
        {"name": str(step), "data": [{"y": shares[step][fates == name]} for name in shown]}
        for step in steps
    ]
    top = max(float(part.max()) for part in shares.values())
    exponent_axis(fig, low, high, VALUES)
    fig.update_yaxes(
        title="share of the values", tickformat=".0%", range=[0, 1.05 * top], fixedrange=True
    )
    fig.update_xaxes(fixedrange=True)
    add_window(fig, held, low, high)
    words = _film_words(frame[frame["step"].isin(steps)], held)
    fig.update_layout(
        dragmode=False,
        margin={"b": 162, "autoexpand": False, "l": 60},
        **_controls(words),
    )
    return fig.figure(frames)


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
            for name, spoken in FATE_WORDS.items()
            if part.get(name) and name in ("lost", "overflow")
        ]
        words[int(step)] = f"step {step:,}" + (" · " if said else "") + ", ".join(said)
    return words


def _controls(words: dict[int, str]) -> dict[str, Any]:
    """The play button and the slider; the words of a step stand above the slider."""
    at_once = {"mode": "immediate", "frame": {"duration": 0, "redraw": False}}
    at_once["transition"] = {"duration": 0}
    playing = {"frame": {"duration": 120, "redraw": False}, "fromcurrent": True}
    playing["transition"] = {"duration": 0}
    play = {"method": "animate", "label": "▶", "args": [None, playing]}
    pause = {"method": "animate", "label": "❚❚", "args": [[None], at_once]}
    clear = "rgba(0,0,0,0)"
    return {
        "updatemenus": [
            {
                "type": "buttons",
                "direction": "left",
                "buttons": [play, pause],
                "showactive": False,
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yanchor": "top",
                "pad": {"t": 78, "r": 8},
                "bgcolor": clear,
                "bordercolor": LINE,
            }
        ],
        "sliders": [
            {
                "active": len(words) - 1,
                "steps": [
                    {"method": "animate", "label": said, "args": [[str(step)], at_once]}
                    for step, said in words.items()
                ],
                "x": 0,
                "xanchor": "left",
                "len": 1,
                "y": 0,
                "pad": {"t": 62, "l": 92},
                "font": {"color": clear, "size": 1},  # a label of each step would not fit
                "currentvalue": {"font": {"size": 13, "color": GREY}, "xanchor": "left"},
                "bgcolor": LINE,
                "bordercolor": LINE,
                "tickcolor": LINE,
                "ticklen": 4,
            }
        ],
    }
