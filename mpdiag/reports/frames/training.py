"""Trainings as tidy tables: losses, scales and skips, predicted against observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from mpdiag.analysis.scaling.replay import Replay
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
    """What else the logs say, a sentence for each: why a training stopped, and the like."""
    return [
        f"{name}: {note.get('stopped') or ', '.join(f'{k} {v}' for k, v in note.items())}"
        for name, log in logs.items()
        for note in log.notes
        if "alarm" not in note
    ]


def outcome_frame(logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """What came of each training: metrics, last loss, skips, last scale; a row for each."""
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
            "share of steps skipped",
            scale.evidence.get("predicted_overflow_rate", np.nan),
            len(log.skipped) / steps if steps else np.nan,
        ),
        ("largest loss scale", scale.max_scale, max((s.scale for s in log.steps), default=np.nan)),
    ]
    return pd.DataFrame(rows, columns=["what", "predicted", "observed"])


def predictions_frame(folders: Mapping[str, Path], logs: Mapping[str, TrainingLog]) -> pd.DataFrame:
    """``prediction_frame`` of each training by a plan that it keeps, with its ``run``.

    A recording's own log is no training by the plan that was made from it: its meta.json names no
    training.

    Raises:
        InputError: If a plan or a meta.json cannot be read.
    """
    frames = []
    for name, log in logs.items():
        folder = folders[name]
        if (folder / "plan.json").is_file() and open_run(folder).meta.get("training"):
            frame = prediction_frame(PrecisionPlan.load(folder / "plan.json"), log)
            frames.append(frame.assign(run=name)[["run", "what", "predicted", "observed"]])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def replay_frame(played: Replay) -> pd.DataFrame:
    """A scaler's replay: ``step``, ``scale``, ``absmax``, ``overflow``, ``lost_share``."""
    return pd.DataFrame(
        {
            "step": played.steps,
            "scale": played.scale,
            "absmax": played.absmax,
            "overflow": played.overflow,
            "lost_share": played.lost,
        }
    )


def family(name: str, known: Iterable[str]) -> list[str]:
    """The trainings that belong with one: those whose name begins with the same recording's.

    ``mpdiag demo`` names them ``ssd``, ``ssd-fp16-no-scale``, ``ssd-fp16-plan``.
    """
    names = list(known)
    root = name.partition("-fp16")[0]
    return sorted((n for n in names if n == root or n.startswith(f"{root}-fp16")), key=len)
