"""A plan beside trainings: what it predicted and what they did, and a scaler's replay."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.scaling.replay import Replay
from mpdiag.display.colors import GREEN, PURPLE, VERMILION
from mpdiag.display.wording import percent, scale_text
from mpdiag.numerics.formats import FP16
from mpdiag.plan import PrecisionPlan
from mpdiag.reports import receipts
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure, log2_axis
from mpdiag.runs.training_log import RECORDED, TrainingLog


def predictions(
    plans: Mapping[str, PrecisionPlan], logs: Mapping[str, TrainingLog]
) -> tuple[pd.DataFrame, list[str]]:
    """What plans expected beside what happened, as people read it.

    A plan may lie in a training's folder and the training be told to scale otherwise: to show what
    goes wrong without a scale, or by a script of its own. The plan then predicts nothing of it.

    Args:
        plans: The plans that lie in the trainings' folders, by training.
        logs: The logs of all trainings.

    Returns:
        ``run``, ``what``, ``predicted``, ``observed``: scales with all digits, shares in percent; and
        a sentence for each training that began with another loss scale than its plan's.
    """
    rows: list[tuple[str, ...]] = []
    others = []
    for name, plan in plans.items():
        log, scale = logs[name], plan.loss_scale
        first = log.steps[0].scale if log.steps else np.nan
        if log.steps and log.steps[0].step == 0 and first != scale.init_scale:
            others.append(
                f"{name} began at a loss scale of {scale_text(first)}, not at the plan's "
                f"{scale_text(scale.init_scale)}, so there is no prediction for it."
            )
            continue
        rate = scale.evidence.get("predicted_overflow_rate", np.nan)
        most = scale.max_scale if scale.adaptive else scale.init_scale
        skipped = len(log.skipped) / len(log.steps) if log.steps else np.nan
        largest = max((s.scale for s in log.steps), default=np.nan)
        at_most = "share of steps skipped, at most (95 %)"
        rows += [
            (name, "first loss scale", _digits(scale.init_scale), _digits(first)),
            (name, at_most, *("–" if np.isnan(x) else percent(x) for x in (rate, skipped))),
            (name, "largest loss scale", _digits(most), _digits(largest)),
        ]
    return pd.DataFrame(rows, columns=["run", "what", "predicted", "observed"]), others


def remarks(logs: Mapping[str, TrainingLog]) -> list[tuple[str, bool]]:
    """What else the logs say, such as why a training stopped.

    Returns:
        Sentences, each with whether it is a warning.
    """
    return [
        (f"{name}: {note.get('stopped') or note.get('message') or _words(note)}", _warns(note))
        for name, log in logs.items()
        for note in log.notes
        if "alarm" not in note and note != RECORDED  # which only says who wrote the log
    ]


def _warns(note: Mapping[str, Any]) -> bool:
    """Whether a note is bad news: what ran in half precision is, if nothing did."""
    share = note.get("half_precision_flops", note)
    return not share if share is not note else note.get("severity") != "info"


def _words(note: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in note.items())


def _digits(scale: float) -> str:
    return "–" if np.isnan(scale) else f"{scale:,.9g}"


def replayed(run: str, played: Replay, arguments: str) -> Picture:
    """A loss scaler replayed over the recorded steps: its scale at each, and what it would lose."""
    columns = {"absmax": played.absmax, "overflow": played.overflow, "lost_share": played.lost}
    frame = pd.DataFrame({"step": played.steps, "scale": played.scale, **columns})
    return Picture(
        "replay",
        "Loss-scale replay",
        "What this scaler would have done with the recorded gradients. Recorded steps are exact. A "
        "step between two of them is assumed to reach the smaller of their maxima. Hover over a "
        "point for the share of all activation gradients that FP16 loses there.",
        replay_figure(frame),
        frame,
        receipts.command(f"mpdiag replay {run} {arguments} --json"),
    )


def replay_figure(frame: pd.DataFrame) -> go.Figure:
    """A scaler's scales, under what each step admits."""
    if frame.empty:
        return empty("no recorded gradients")
    fig = figure(340)
    finite = frame[np.isfinite(frame["absmax"]) & (frame["absmax"] > 0)]
    limits = FP16.overflow_threshold / finite["absmax"]
    hover = "step %{x}: overflows at %{y:.4g}<extra></extra>"
    fig.line(finite["step"], limits, "overflows from here on", PURPLE, hover, dash="dot", width=1.5)
    hover = "step %{x}: scale %{y:g}, %{customdata:.2%} lost<extra></extra>"
    dots: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 5}}
    dots["customdata"] = frame["lost_share"]
    fig.line(frame["step"], frame["scale"], "loss scale", GREEN, hover, shape="hv", **dots)
    skipped = frame[frame["overflow"]]
    if len(skipped):
        hover, name = "step %{x}: skipped<extra></extra>", f"skipped ({len(skipped)})"
        fig.marks(skipped["step"], skipped["scale"], name, VERMILION, hover, mark=("x", 11))
    log2_axis(fig, [*frame["scale"], *limits])
    return fig.update_xaxes(title="step")
