"""Layers: one layer over the steps, and what moved at one step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from plotly.graph_objects import Figure

from mpdiag.analysis.figures import at_scale
from mpdiag.display.svg import Range
from mpdiag.display.wording import (
    KIND_NAMES,
    counted,
    layer_name,
    magnitude,
    percent,
    sentence,
    spoken_layer,
)
from mpdiag.numerics.formats import FloatFormat
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.receipts import Rows, loss_of_recording
from mpdiag.reports.views import layer_figures as figure
from mpdiag.reports.views import layer_tables as tables
from mpdiag.reports.views.gradients.figure import window as range_of
from mpdiag.reports.views.gradients.frame import time_frame
from mpdiag.runs.records import Records
from mpdiag.runs.schema import Kind
from mpdiag.runs.training_log import TrainingLog


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
        return range_of(self.fmt, self.exponent)

    @property
    def scale(self) -> str:
        """The loss scale, as a phrase."""
        return at_scale(2.0**self.exponent)

    def _picture(self, key: str, title: str, caption: str, drawn: Figure) -> Picture:
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
            figure.over_time(self.over_steps, self.held, log=log),
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
            figure.course_figure(frame, updates, self.fmt, self.scale),
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


def loss_curve(run: str, log: TrainingLog, recorded: np.ndarray, step: int | None) -> Picture:
    """The loss of a recording, to select a step of it.

    Args:
        run: The run folder.
        log: Its training log.
        recorded: The recorded steps.
        step: The selected one.
    """
    known = [(s.step, s.loss) for s in log.steps if s.loss is not None and np.isfinite(s.loss)]
    frame = pd.DataFrame(known, columns=["step", "loss"]).astype({"step": int, "loss": float})
    rises = tables.loss_rises(log)
    here = np.isin(frame["step"], recorded)
    caption = f"Large points: the {counted(int(here.sum()), 'step')} with recorded gradients."
    if len(rises):
        top = rises.iloc[0]
        caption += (
            f" The largest rise is at step {int(top['step']):,}: {top['rise']:.3g} above the median of "
            f"up to {tables.BEFORE} steps before."
        )
    return Picture(
        "loss-of-recording",
        "Loss of the recorded training",
        caption,
        figure.loss_figure(frame["step"], frame["loss"], here, step, rises),
        frame,
        loss_of_recording(run),
    )


def movement(
    run: str,
    records: Records,
    kind: Kind,
    step: int,
    fmt: FloatFormat,
    frame: pd.DataFrame | None = None,
) -> Picture:
    """The layers that moved most at a recorded step, against the recorded steps before it."""
    if frame is None:
        frame = tables.movement_frame(records, kind, step, fmt)
    steps = tables.recorded_steps(records, kind)
    earlier = steps[steps < step][-tables.BEFORE :]
    caption = ""
    if len(frame) and len(earlier):
        most, middle = frame.iloc[0], float(frame["shift"].median())
        caption = (
            f"Compared with the {counted(len(earlier), 'recorded step')} before it ({earlier[0]:,} to "
            f"{earlier[-1]:,}), the {KIND_NAMES[kind]} of {spoken_layer(str(most['layer']))} moved "
            f"most, by {most['shift']:+.2f} powers of two. The median of "
            f"{counted(len(frame), 'layer')} is {middle:+.2f}."
        )
    return Picture(
        "movement",
        f"Layers that moved most at step {step:,}",
        caption,
        figure.movement_figure(frame),
        frame,
        Rows(run, kind).movement(fmt, step, tables.BEFORE),
    )


VIEW = View("layers", "Layers", "account_tree")
