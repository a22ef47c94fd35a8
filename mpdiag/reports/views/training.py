"""Trainings: losses, scales and skips, drift, predicted against observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mpdiag.display.colors import SERIES, VERMILION
from mpdiag.display.wording import beginning, counted, in_figure, percent, scale_text
from mpdiag.reports.picture import Picture, View
from mpdiag.reports.plotting import empty, figure, log2_axis, log10_axis
from mpdiag.reports.receipts import training_logs
from mpdiag.runs.training_log import RECORDED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import plotly.graph_objects as go

    from mpdiag.plan import PrecisionPlan
    from mpdiag.reports.contents import RunContents
    from mpdiag.runs.training_log import TrainingLog

_COLUMNS = ("step", "loss", "scale", "skipped", "reason", "gradient_norm", "seconds")


def steps_frame(log: TrainingLog) -> pd.DataFrame:
    """One training's steps, the columns of ``training.jsonl``."""
    rows = [{name: getattr(step, name) for name in _COLUMNS} for step in log.steps]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    for name in ("loss", "scale", "gradient_norm", "seconds"):
        frame[name] = frame[name].astype(float)
    return frame.astype({"skipped": bool, "reason": str})


def losses_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """The losses of several trainings: ``run``, ``step``, ``loss``."""
    frames = [steps_frame(log)[["step", "loss"]].assign(run=name) for name, log in logs.items()]
    columns = ["run", "step", "loss"]
    if not frames:
        return pd.DataFrame(columns=columns)
    return pd.concat(frames, ignore_index=True)[columns]


def scales_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """The loss scales of several trainings: ``run``, ``step``, ``scale``, ``skipped``, ``reason``."""
    columns = ["run", "step", "scale", "skipped", "reason"]
    frames = [steps_frame(log).assign(run=name)[columns] for name, log in logs.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def norms_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """The norms of unscaled gradients, as far as logged: ``run``, ``step``, ``gradient_norm``."""
    columns = ["run", "step", "gradient_norm"]
    frames = [steps_frame(log).assign(run=name)[columns] for name, log in logs.items()]
    if not frames:
        return pd.DataFrame({name: pd.Series(dtype=float) for name in columns})
    return pd.concat(frames, ignore_index=True).dropna(ignore_index=True)


def alarms_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """Where gradients left what the recording predicted: ``run``, ``step``, ``message``."""
    columns = ["run", "step", "alarm", "predicted", "observed", "message"]
    rows = [
        {name: note.get(name) for name in columns} | {"run": name}
        for name, log in logs.items()
        for note in log.notes
        if "alarm" in note
    ]
    frame = pd.DataFrame(rows, columns=columns)
    for name in ("step", "predicted", "observed"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype(float)
    return frame


def remarks(logs: Mapping[str, TrainingLog]) -> list[str]:
    """What else the logs say, a sentence each, such as why a training stopped."""
    return [
        f"{name}: {note.get('stopped') or note.get('message') or _words(note)}"
        for name, log in logs.items()
        for note in log.notes
        if "alarm" not in note and note != RECORDED  # which only says who wrote the log
    ]


def _words(note: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in note.items())


def last_loss(log: TrainingLog, window: int = 1) -> float | None:
    """The median of the last finite losses in so many steps; None if there are none."""
    last = [s.loss for s in log.steps[-window:] if s.loss is not None and np.isfinite(s.loss)]
    return float(np.median(last)) if last else None


def outcome_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """The result of each training: metrics, last loss, skips, last scale; a row for each."""
    rows: list[dict[str, Any]] = []
    for name, log in logs.items():
        losses = [s.loss for s in log.steps if s.loss is not None]
        row: dict[str, Any] = {"run": name}
        row |= {m.metric: m.value for m in log.metrics}
        row |= {
            "last_loss": losses[-1] if losses else None,
            "steps": len(log.steps),
            "skipped": len(log.skipped),
            "last_scale": log.steps[-1].scale if log.steps else None,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def prediction_frame(plan: PrecisionPlan, log: TrainingLog) -> pd.DataFrame:
    """What the plan expected beside what happened: ``what``, ``predicted``, ``observed``."""
    scale = plan.loss_scale
    steps = len(log.steps)
    rows = [
        ("first loss scale", scale.init_scale, log.steps[0].scale if steps else np.nan),
        (
            "share of steps skipped, at most (95 %)",
            scale.evidence.get("predicted_overflow_rate", np.nan),
            len(log.skipped) / steps if steps else np.nan,
        ),
        ("largest loss scale", scale.max_scale, max((s.scale for s in log.steps), default=np.nan)),
    ]
    return pd.DataFrame(rows, columns=["what", "predicted", "observed"])


def predictions_frame(
    plans: Mapping[str, PrecisionPlan], logs: Mapping[str, TrainingLog]
) -> pd.DataFrame:
    """``prediction_frame`` of each training that followed a plan, with its ``run``.

    Args:
        plans: The plans that trainings followed, by training.
        logs: Their logs.
    """
    columns = ["run", "what", "predicted", "observed"]
    frames = [
        prediction_frame(plans[name], log).assign(run=name)[columns]
        for name, log in logs.items()
        if name in plans
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def followed(
    plans: Mapping[str, PrecisionPlan], logs: Mapping[str, TrainingLog]
) -> tuple[dict[str, PrecisionPlan], list[str]]:
    """The plans that trainings followed, and a sentence for each that began with another loss scale.

    A plan may lie in a training's folder and the training be told to scale otherwise: to show what
    goes wrong without a scale, or by a script of its own. The plan then predicts nothing of it.

    Args:
        plans: The plans that lie in the trainings' folders, by training.
        logs: The logs.
    """
    found: dict[str, PrecisionPlan] = {}
    others = []
    for name, plan in plans.items():
        steps = logs[name].steps if name in logs else ()
        planned = plan.loss_scale.init_scale
        if steps and steps[0].step == 0 and steps[0].scale != planned:
            began, said = scale_text(steps[0].scale), scale_text(planned)
            others.append(
                f"{name} began at a loss scale of {began}, and the plan in its folder at {said}: the "
                "plan predicts nothing of it."
            )
        else:
            found[name] = plan
    return found, others


def spoken_predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """A ``predictions_frame`` as people read its numbers: scales with all digits, shares in percent."""
    shown = frame.copy()
    for column in ("predicted", "observed"):
        shown[column] = [
            _spoken(what, value) for what, value in zip(frame["what"], frame[column], strict=True)
        ]
    return shown


def _spoken(what: str, value: float) -> str:
    if np.isnan(value):
        return "–"
    return percent(value) if what.startswith("share") else f"{value:,.9g}"


def family(name: str, known: Iterable[str]) -> list[str]:
    """The trainings that belong with one: those whose name begins with the same recording's.

    ``mpdiag demo`` names them ``ssd``, ``ssd-fp16-no-scale``, ``ssd-fp16-plan``.
    """
    names = list(known)
    root = root_of(name)
    return sorted((n for n in names if n == root or n.startswith(f"{root}-fp16")), key=len)


def root_of(name: str) -> str:
    """The recording that a training belongs with, by its name; of a recording its own."""
    return name.partition("-fp16")[0] or name


# -- figures ---------------------------------------------------------------------------------------


LONGEST = 120
"""Characters of a reason or a message under the pointer."""
_DASHES = ("solid", "dash", "dot", "dashdot")


def losses_figure(
    frame: pd.DataFrame, runs: Sequence[str], *, log: bool = False, window: int = 1
) -> go.Figure:
    """Loss curves (``losses_frame``), a line for each run.

    Args:
        frame: The table.
        runs: In the order of the other figures, so that each keeps its colour.
        log: A log scale; what is not positive is left out there.
        window: Steps of a running median, drawn over the pale raw line.
    """
    if frame.empty:
        return empty("no training log")
    fig = figure(380)
    for run, part in frame.groupby("run", sort=False):
        i, name = list(runs).index(str(run)), in_figure(str(run))
        colour = SERIES[i % len(SERIES)]
        y = part["loss"].where(np.isfinite(part["loss"].astype(float)))
        hover = "step %{x}: %{y:.5g}<extra>" + name + "</extra>"
        smooth = window > 1
        fig.add_scatter(
            x=part["step"],
            y=y,
            name=name,
            mode="lines",
            showlegend=not smooth,
            opacity=0.28 if smooth else 1.0,
            line={"color": colour, "width": 1 if smooth else 2, "dash": _DASHES[i % 4]},
            hovertemplate=hover,
        )
        if smooth:
            fig.add_scatter(
                x=part["step"],
                y=y.rolling(window, min_periods=1, center=True).median(),
                name=name,
                mode="lines",
                line={"color": colour, "width": 2.5, "dash": _DASHES[i % 4]},
                hovertemplate=hover,
            )
    fig.update_xaxes(title="step")
    fig.update_yaxes(title="loss", type="log" if log else "linear")
    if log:
        log10_axis(fig, frame["loss"])
    return fig.figure()


def scales_figure(frame: pd.DataFrame, runs: Sequence[str]) -> go.Figure:
    """The loss scales of some trainings, a cross at each skip with its cause.

    Args:
        frame: ``scales_frame``.
        runs: In the order of the other figures, so that each keeps its colour.
    """
    if frame.empty:
        return empty("no steps")
    fig = figure(300)
    for run, part in frame.groupby("run", sort=False):
        i, name = list(runs).index(str(run)), in_figure(str(run))
        colour = SERIES[i % len(SERIES)]
        fig.add_scatter(
            x=part["step"],
            y=part["scale"],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5, "shape": "hv", "dash": _DASHES[i % 4]},
            hovertemplate="step %{x}: scale %{y:g}<extra>" + name + "</extra>",
        )
    skipped = frame[frame["skipped"]]
    if len(skipped):
        fig.add_scatter(
            x=skipped["step"],
            y=skipped["scale"],
            name=f"skipped ({len(skipped)})",
            mode="markers",
            marker={"color": VERMILION, "symbol": "x", "size": 10},
            customdata=[in_figure(beginning(str(r), LONGEST)) for r in skipped["reason"]],
            hovertemplate="step %{x} skipped: %{customdata}<extra></extra>",
        )
    log2_axis(fig, frame["scale"])
    fig.update_xaxes(title="step")
    return fig.figure()


def drift_figure(norms: pd.DataFrame, alarms: pd.DataFrame, runs: Sequence[str]) -> go.Figure:
    """Norms of the unscaled gradients (``norms_frame``), a mark where an alarm was raised.

    Args:
        norms: The table.
        alarms: ``alarms_frame``.
        runs: In the order of the other figures, so that each keeps its colour.
    """
    known = norms[np.isfinite(norms["gradient_norm"]) & (norms["gradient_norm"] > 0)]
    if known.empty:
        return empty("no norm of gradients was logged")
    fig = figure(300)
    for i, run in enumerate(runs):
        part, name = known[known["run"] == run], in_figure(str(run))
        if part.empty:
            continue
        colour = SERIES[i % len(SERIES)]
        fig.add_scatter(
            x=part["step"],
            y=part["gradient_norm"],
            name=name,
            mode="lines",
            line={"color": colour, "width": 1.5, "dash": _DASHES[i % 4]},
            hovertemplate="step %{x}: %{y:.4g}<extra>" + name + "</extra>",
        )
    if len(alarms):
        heights = []
        for alarm in alarms.to_dict("records"):
            own = known[known["run"] == alarm["run"]]
            near = own.iloc[(own["step"] - alarm["step"]).abs().argsort()[:1]]["gradient_norm"]
            heights.append(
                float(near.iloc[0]) if len(near) else float(known["gradient_norm"].max())
            )
        fig.add_scatter(
            x=alarms["step"],
            y=heights,
            name=f"alarms ({len(alarms)})",
            mode="markers",
            marker={"color": VERMILION, "symbol": "triangle-up", "size": 13},
            customdata=[
                in_figure(beginning(f"{a}: {m}", LONGEST))
                for a, m in zip(alarms["run"], alarms["message"], strict=True)
            ],
            hovertemplate="step %{x}, %{customdata}<extra></extra>",
        )
    log10_axis(fig, known["gradient_norm"])
    fig.update_yaxes(type="log", title="‖gradients‖")
    fig.update_xaxes(title="step")
    return fig.figure()


# -- pictures --------------------------------------------------------------------------------------


def losses(
    folder: str, logs: Mapping[str, TrainingLog], *, log: bool = False, window: int = 1
) -> Picture:
    """Loss curves of several trainings."""
    frame = losses_frame(logs)
    return Picture(
        "losses",
        "Loss",
        _loss_words(logs, window),
        losses_figure(frame, list(logs), log=log, window=window),
        frame,
        training_logs(folder, list(logs), ["loss"]),
    )


def _loss_words(logs: Mapping[str, TrainingLog], window: int) -> str:
    """How to read the curves, and where each one ends."""
    ends = {name: last_loss(log, window) for name, log in logs.items()}
    told = ", ".join(f"{name} {end:.4g}" for name, end in ends.items() if end is not None)
    if window > 1:
        how = f"Pale: each step; full: a running median over {window} steps."
        return f"{how} Median of the last {window} steps: {told}." if told else how
    return f"Last loss: {told}." if told else ""


def _scale_words(logs: Mapping[str, TrainingLog]) -> str:
    """Which scales there were, and what was skipped."""
    told = []
    for name, log in logs.items():
        seen = [s.scale for s in log.steps]
        if not seen:
            continue
        low, high = scale_text(min(seen)), scale_text(max(seen))
        span = low if low == high else f"{low} to {high}"
        skips = (
            f", {counted(len(log.skipped), 'step')} skipped" if log.skipped else ", none skipped"
        )
        told.append(f"{name} {span}{skips}")
    crosses = any(log.skipped for log in logs.values())
    words = "; ".join(told) + "." if told else ""
    return f"{words} Crosses mark skipped steps; hover for the cause." if crosses else words


def scales(
    folder: str, logs: Mapping[str, TrainingLog], runs: Sequence[str] | None = None
) -> Picture:
    """The loss scales of several trainings, and each skip with its cause.

    Args:
        folder: Where the runs are.
        logs: Their logs.
        runs: All runs of the figures beside it, in their order; None for those of the logs.
    """
    frame = scales_frame(logs)
    return Picture(
        "scale",
        "Loss scale",
        _scale_words(logs),
        scales_figure(frame, list(runs or logs)),
        frame,
        training_logs(folder, list(logs), ["scale", "skipped"]),
    )


def _drift_words(norms: pd.DataFrame, alarms: pd.DataFrame) -> str:
    known = norms[np.isfinite(norms["gradient_norm"])]
    span = ""
    if len(known):
        low, high = known["gradient_norm"].min(), known["gradient_norm"].max()
        span = f"Norms from {low:.3g} to {high:.3g}. "
    if alarms.empty:
        return f"{span}No alarm was raised."
    raised = counted(len(alarms), "alarm")
    left = "the gradients left the range that the plan's recording predicted"
    return f"{span}{raised} (triangles): {left}."


def drift(folder: str, logs: Mapping[str, TrainingLog]) -> Picture:
    """Norms of the gradients of several trainings, and where they left what was predicted."""
    frame = norms_frame(logs)
    runs = list(logs)
    return Picture(
        "drift",
        "Gradients over time, and alarms of drift",
        "Unscaled, before clipping. " + _drift_words(frame, alarms_frame(logs)),
        drift_figure(frame, alarms_frame(logs), runs),
        frame,
        training_logs(folder, runs, ["gradient_norm"], known=True),
    )


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: the run's own log."""
    if contents.log is None:
        return
    folder, logs = str(contents.folder.parent), {contents.folder.name: contents.log}
    yield losses(folder, logs, log=True, window=15)
    if len(norms_frame(logs)):
        yield drift(folder, logs)


VIEW = View("training", "Training", "show_chart", reported)
