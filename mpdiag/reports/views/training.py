"""Trainings: losses, scales and skips, drift."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import VERMILION
from mpdiag.display.wording import beginning, counted, in_figure, scale_text
from mpdiag.reports import receipts
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure, log2_axis, log10_axis, run_styles
from mpdiag.runs.training_log import FINAL_WORDS, TrainingLog

_COLUMNS = ("step", "loss", "scale", "skipped", "reason", "gradient_norm", "seconds")
LONGEST = 120
"""Characters of a reason or a message under the pointer."""


def steps_frame(log: TrainingLog) -> pd.DataFrame:
    """One training's steps, the columns of ``training.jsonl``."""
    rows = [{name: getattr(step, name) for name in _COLUMNS} for step in log.steps]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    for name in ("loss", "scale", "gradient_norm", "seconds"):
        frame[name] = frame[name].astype(float)
    return frame.astype({"skipped": bool, "reason": str})


@dataclass(frozen=True, eq=False)
class Trainings:
    """Several trainings: their tables and pictures.

    Attributes:
        folder: Where the runs are.
        logs: Their logs, by name.
        places: Each run's place, which its colour goes by.
    """

    folder: str
    logs: Mapping[str, TrainingLog]
    places: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All steps: ``run``, and the columns of ``steps_frame``."""
        frames = [steps_frame(log).assign(run=name) for name, log in self.logs.items()]
        columns = ["run", *_COLUMNS]
        return pd.concat(frames, ignore_index=True)[columns] if frames else _no_rows(columns)

    @cached_property
    def norms(self) -> pd.DataFrame:
        """The norms of unscaled gradients, as far as logged: ``run``, ``step``, ``gradient_norm``."""
        return self.steps[["run", "step", "gradient_norm"]].dropna(ignore_index=True)

    @cached_property
    def alarms(self) -> pd.DataFrame:
        """Where gradients left what the recording predicted, and by how much."""
        columns = ["run", "step", "alarm", "predicted", "observed", "message"]
        rows = [
            {name: note.get(name) for name in columns} | {"run": name}
            for name, log in self.logs.items()
            for note in log.notes
            if "alarm" in note
        ]
        frame = pd.DataFrame(rows, columns=columns)
        for name in ("step", "predicted", "observed"):
            frame[name] = pd.to_numeric(frame[name], errors="coerce").astype(float)
        return frame

    def outcomes(self) -> pd.DataFrame:
        """The result of each training: metrics, final loss, skips, last scale; a row for each."""
        rows: list[dict[str, Any]] = []
        for name, log in self.logs.items():
            row: dict[str, Any] = {"run": name} | {m.metric: m.value for m in log.metrics}
            row |= {"final_loss": log.final_loss, "steps": len(log.steps)}
            last_scale = log.steps[-1].scale if log.steps else None
            rows.append(row | {"skipped": len(log.skipped), "last_scale": last_scale})
        return pd.DataFrame(rows)

    def losses(self, *, log: bool = False, window: int = 1) -> Picture:
        """Loss curves.

        Args:
            log: A log scale; what is not positive is left out there.
            window: Steps of a running median, drawn over the pale raw line.
        """
        return Picture(
            "losses",
            "Loss",
            self._loss_words(window),
            self._losses_figure(log=log, window=window),
            self.steps[["run", "step", "loss"]],
            receipts.training_logs(self.folder, [*self.logs], ["loss"]),
        )

    def _loss_words(self, window: int) -> str:
        """How to read the curves, and where each one ends."""
        how = f"Pale: each step; full: a running median over {window} steps." if window > 1 else ""
        return " ".join(filter(None, (how, final_losses(self.logs))))

    def _losses_figure(self, *, log: bool, window: int) -> go.Figure:
        if self.steps.empty:
            return empty("no training log")
        fig = figure(380)
        for name, part, style in self._curves(self.steps):
            y = part["loss"].where(np.isfinite(part["loss"]))
            hover = "step %{x}: %{y:.5g}<extra>" + name + "</extra>"
            if window > 1:
                pale: dict[str, Any] = {"showlegend": False, "opacity": 0.28}
                fig.line(part["step"], y, name, hover=hover, width=1, **style, **pale)
                y = y.rolling(window, min_periods=1, center=True).median()
                fig.line(part["step"], y, name, hover=hover, **style)
            else:
                whole: dict[str, Any] = {"showlegend": True, "opacity": 1.0}
                fig.line(part["step"], y, name, hover=hover, width=2, **style, **whole)
        fig.update_yaxes(title="loss", type="log" if log else "linear")
        if log:
            log10_axis(fig, self.steps["loss"])
        return fig.update_xaxes(title="step")

    def _curves(self, frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
        """Of each run in a table its name, its rows, and how its line is drawn in every figure."""
        styles = run_styles(self.logs, self.places)
        for run, part in frame.groupby("run", sort=False):
            yield in_figure(str(run)), part, styles[str(run)]

    def scales(self) -> Picture:
        """The loss scales, and each skip with its cause."""
        return Picture(
            "scale",
            "Loss scale",
            self._scale_words(),
            self._scales_figure(),
            self.steps[["run", "step", "scale", "skipped", "reason"]],
            receipts.training_logs(self.folder, [*self.logs], ["scale", "skipped"]),
        )

    def _scale_words(self) -> str:
        """Which scales there were, and what was skipped."""
        told = []
        for name, log in self.logs.items():
            seen = [s.scale for s in log.steps]
            if not seen:
                continue
            low, high = scale_text(min(seen)), scale_text(max(seen))
            skips = (
                f"{counted(len(log.skipped), 'step')} skipped" if log.skipped else "none skipped"
            )
            told.append(f"{name} {low if low == high else f'{low} to {high}'}, {skips}")
        words = "; ".join(told) + "." if told else ""
        crosses = any(log.skipped for log in self.logs.values())
        return f"{words} Crosses mark skipped steps; hover for the cause." if crosses else words

    def _scales_figure(self) -> go.Figure:
        frame = self.steps
        if frame.empty:
            return empty("no steps")
        fig = figure(300)
        for name, part, style in self._curves(frame):
            hover = "step %{x}: scale %{y:g}<extra>" + name + "</extra>"
            fig.line(part["step"], part["scale"], name, hover=hover, shape="hv", **style)
        skipped = frame[frame["skipped"]]
        if len(skipped):
            causes = [in_figure(beginning(str(r), LONGEST)) for r in skipped["reason"]]
            hover = "step %{x} skipped: %{customdata}<extra></extra>"
            name = f"skipped ({len(skipped)})"
            at = (skipped["step"], skipped["scale"])
            fig.marks(*at, name, VERMILION, hover, mark=("x", 10), customdata=causes)
        log2_axis(fig, frame["scale"])
        return fig.update_xaxes(title="step")

    def drift(self) -> Picture:
        """Norms of the gradients, and where they left what was predicted."""
        return Picture(
            "drift",
            "Gradients over time, and alarms of drift",
            "Unscaled, before clipping. " + self._drift_words(),
            self._drift_figure(),
            self.norms,
            receipts.training_logs(self.folder, [*self.logs], ["gradient_norm"], known=True),
        )

    def _drift_words(self) -> str:
        known = self.norms[np.isfinite(self.norms["gradient_norm"])]["gradient_norm"]
        span = f"Norms from {known.min():.3g} to {known.max():.3g}. " if len(known) else ""
        lacking = [name for name in self.logs if name not in set(self.norms["run"])]
        if len(known) and lacking:
            span += f"{' and '.join(lacking)} logged no norms. "
        if self.alarms.empty:
            return f"{span}No alarm was raised."
        raised = counted(len(self.alarms), "alarm")
        left = "the gradients left the range that the plan's recording predicted"
        return f"{span}{raised} (triangles): {left}."

    def _drift_figure(self) -> go.Figure:
        norms, alarms = self.norms, self.alarms
        known = norms[np.isfinite(norms["gradient_norm"]) & (norms["gradient_norm"] > 0)]
        if known.empty:
            return empty("no gradient norm was logged")
        fig = figure(300)
        for name, part, style in self._curves(known):
            hover = "step %{x}: %{y:.4g}<extra>" + name + "</extra>"
            fig.line(part["step"], part["gradient_norm"], name, hover=hover, width=1.5, **style)
        if len(alarms):
            fig.marks(
                alarms["step"],
                [_height(known, alarm) for alarm in alarms.to_dict("records")],
                f"alarms ({len(alarms)})",
                VERMILION,
                "step %{x}, %{customdata}<extra></extra>",
                mark=("triangle-up", 13),
                customdata=[
                    in_figure(beginning(f"{a}: {m}", LONGEST))
                    for a, m in zip(alarms["run"], alarms["message"], strict=True)
                ],
            )
        log10_axis(fig, known["gradient_norm"])
        fig.update_yaxes(type="log", title="‖gradients‖")
        return fig.update_xaxes(title="step")


def _no_rows(columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=float) for name in columns}).astype(
        {"skipped": bool}
    )


def _height(known: pd.DataFrame, alarm: Mapping[Any, Any]) -> float:
    """Where an alarm stands: at the norm of the step nearest to it, of the same run if it has one."""
    own = known[known["run"] == alarm["run"]]
    near = own.iloc[(own["step"] - alarm["step"]).abs().argsort()[:1]]["gradient_norm"]
    return float(near.iloc[0]) if len(near) else float(known["gradient_norm"].max())


def final_losses(logs: Mapping[str, TrainingLog]) -> str:
    """Where the losses of some trainings end, in a sentence; "" where none was logged."""
    ends = {name: log.final_loss for name, log in logs.items()}
    told = ", ".join(f"{name} {end:.4g}" for name, end in ends.items() if end is not None)
    return f"Final loss ({FINAL_WORDS}): {told}." if told else ""


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: the run's own log."""
    if contents.log is None:
        return
    shown = Trainings(str(contents.folder.parent), {contents.analysis.run.name: contents.log})
    yield shown.losses(log=True, window=15)
    if len(shown.norms):
        yield shown.drift()
