"""Layers: one layer over the steps."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.figures import at_scale
from mpdiag.display.colors import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from mpdiag.display.wording import layer_name, magnitude, percent, sentence
from mpdiag.numerics.formats import FloatFormat
from mpdiag.reports import plotting
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.receipts import Rows
from mpdiag.reports.views import layer_tables as tables
from mpdiag.reports.views.gradients import figure
from mpdiag.reports.views.gradients.figure import Range
from mpdiag.reports.views.gradients.frame import time_frame
from mpdiag.runs.records import Records
from mpdiag.runs.schema import Kind


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer at each recorded step: its pictures in a format, at a loss scale.

    Attributes:
        run: The run folder.
        records: The recording.
        kind: Of which tensors.
        name: The layer's.
        fmt: The format.
        exponent: log2 of the loss scale.
    """

    run: str
    records: Records
    kind: Kind
    name: str
    fmt: FloatFormat
    exponent: int

    @cached_property
    def over_steps(self) -> pd.DataFrame:
        """Its values in each power of two, step by step."""
        return time_frame(self.records, self.kind, self.name)

    @property
    def held(self) -> Range:
        """What the format holds at the loss scale."""
        return figure.window(self.fmt, self.exponent)

    @property
    def scale(self) -> str:
        """The loss scale, as a phrase."""
        return at_scale(2.0**self.exponent)

    def _picture(self, key: str, title: str, caption: str, drawn: go.Figure) -> Picture:
        """One of the pictures of ``over_steps``."""
        receipt = Rows(self.run, self.kind, self.name).bins("step", "exponent")
        return Picture(key, title, caption, drawn, self.over_steps, receipt)

    def over_time(self, *, log: bool = True) -> Picture:
        """Steps × powers of two."""
        return self._picture(
            "over-time",
            f"{layer_name(self.name)} over time",
            f"Each column is a recorded step. The lines mark {self.fmt.label}'s range {self.scale}. "
            f"{_moved(self.over_steps)}".rstrip(),
            over_time_figure(self.over_steps, self.held, log=log),
        )

    def course(self) -> Picture:
        """What it loses, its largest value and its updates, step by step."""
        frame = tables.layer_course_frame(
            self.records, self.kind, self.name, self.fmt, self.exponent
        )
        updates = tables.layer_updates_frame(self.records, self.name)
        return Picture(
            "layer-course",
            "Share lost, largest value, updates",
            _course_words(frame, updates, self.fmt, self.exponent),
            course_figure(frame, updates, self.fmt, self.scale),
            frame,
            Rows(self.run, self.kind, self.name).course(self.fmt, self.exponent),
        )


def _course_words(
    frame: pd.DataFrame, updates: pd.DataFrame, fmt: FloatFormat, exponent: int
) -> str:
    if frame.empty:
        return ""
    text = ""
    for column, scale in (("sum_share", 1.0), ("sum_share_scaled", 2.0**exponent)):
        if column == "sum_share_scaled" and exponent == 0:
            continue
        at = int(frame[column].to_numpy().argmax())
        most = float(frame[column].iloc[at])
        where = f", at step {frame['step'].iloc[at]:,}" if most > 0 else ""
        said = sentence(at_scale(scale))[:-1]
        text += f"{said} {fmt.label} loses at most {percent(most)} of its sum in a step{where}. "
    top = int(frame["absmax"].to_numpy().argmax())
    text += (
        f"Its largest value is {magnitude(float(frame['absmax'].iloc[top]))}, at step "
        f"{frame['step'].iloc[top]:,}"
    )
    if len(updates):
        first, last = (2.0 ** float(updates["update_ratio"].iloc[i]) for i in (0, -1))
        text += (
            f"; an update of its parameters is {magnitude(first)} of the weight in the first "
            f"recorded step and {magnitude(last)} in the last (geometric means, estimated)"
        )
    return f"{text}."


def _moved(frame: pd.DataFrame) -> str:
    """How far the mean exponent moved from the first to the last step of a ``time_frame``."""
    steps = sorted(int(s) for s in frame["step"].unique())
    if not steps:
        return ""
    means = []
    for step in (steps[0], steps[-1]):
        part = frame[frame["step"] == step]
        means.append(float((part["exponent"] * part["count"]).sum() / part["count"].sum()))
    moved = means[1] - means[0]
    way = "larger" if moved > 0 else "smaller"
    return (
        f"From step {steps[0]:,} to step {steps[-1]:,} the values become {way} by "
        f"{abs(moved):.1f} powers of two (means of their exponents)."
        if abs(moved) >= 0.05
        else f"The mean of the exponents is the same at step {steps[0]:,} and at step {steps[-1]:,}."
    )


WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"


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
    base: dict[str, Any] = fig.layout.yaxis.to_plotly_json()
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
    return fig


_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}
"""An axis of log2, labelled as powers of two."""


def _line(
    fig: plotting.Drawing, x: Any, y: Any, name: str, colour: str, axis: str, dash: str = "solid"
) -> None:
    hover = "%{y:.2%}" if axis == "y" else "2^%{y:.1f}"
    dots = {"marker": {"size": 4}, "yaxis": axis}
    fig.dotted_line(x, y, name, colour, hover, width=2, dash=dash, **dots)


_NOTHING = "no non-zero values in any recorded step"


def over_time_figure(frame: pd.DataFrame, held: Range, *, log: bool) -> go.Figure:
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
    fig.update_yaxes(fig.layout.xaxis.to_plotly_json())
    fig.layout.xaxis = {
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
            line = {"color": colour, "width": 1.5, "dash": "dot"}
            fig.add_hline(place, annotation=label, annotation_position="top right", line=line)
    return fig


VIEW = View("layers", "Layers", "account_tree")
