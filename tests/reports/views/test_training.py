"""Trainings: losses, scales and alarms as they were logged, and their receipts."""

import made_runs as hand
import pytest
from receipt_checks import same_numbers

from mpdiag.reports.views import training
from mpdiag.runs.training_log import read_log


@pytest.fixture(scope="module")
def logs(root):
    names = ("digits", "digits-fp16-plan", "digits-fp16-no-scale")
    return {name: read_log(root / "sample_runs" / name) for name in names}


def test_losses_and_scales_and_their_receipts(root, logs):
    folder = str(root / "sample_runs")
    losses = training.Trainings(folder, logs).losses(log=True, window=5)
    same_numbers(losses, needed=["run", "step", "loss"])
    assert len(losses.frame) == sum(len(log.steps) for log in logs.values())
    raw = next(trace for trace in losses.figure.data if not trace.showlegend)
    assert list(raw.y) == [step.loss for step in logs["digits"].steps]
    same_numbers(
        training.Trainings(folder, logs).scales(), needed=["run", "step", "scale", "skipped"]
    )


def test_a_run_keeps_its_colour_in_figures_of_fewer_runs(root, logs):
    folder = str(root / "sample_runs")
    names = list(logs)
    assert len(names) > 1
    places = {name: i for i, name in enumerate(names)}
    line = next(
        t
        for t in training.Trainings(folder, logs, places).losses().figure.data
        if t.name == names[-1]
    )
    alone = training.Trainings(folder, {names[-1]: logs[names[-1]]}, places)
    alone = alone.scales().figure.data[0]
    assert (alone.line.color, alone.line.dash) == (line.line.color, line.line.dash)
    first = training.Trainings(folder, {names[-1]: logs[names[-1]]}).scales().figure.data[0]
    assert first.line.color != alone.line.color


def test_skips_infinities_and_torn_lines(tmp_path):
    lines = [
        {"step": 0, "loss": 1.5, "scale": 4.0, "skipped": False, "reason": ""},
        {"step": 1, "loss": "inf", "scale": 4.0, "skipped": True, "reason": "<b>overflow</b>"},
        {"step": 2, "loss": "nan", "scale": 2.0, "skipped": False, "reason": ""},
        {"metric": "accuracy", "value": 0.5, "higher_is_better": True},
    ]
    hand.write_log(tmp_path / "run", *lines)
    logs = {"run": read_log(tmp_path / "run")}
    same_numbers(training.Trainings(str(tmp_path), logs).losses(), needed=["loss"])
    scales = training.Trainings(str(tmp_path), logs).scales()
    same_numbers(scales, needed=["skipped"])
    (cross,) = [t for t in scales.figure.data if str(t.name).startswith("skipped")]
    assert list(cross.x) == [1]
    assert list(cross.customdata) == ["&lt;b&gt;overflow&lt;/b&gt;"]
    (row,) = training.Trainings("", logs).outcomes().to_dict("records")
    assert (row["accuracy"], row["skipped"], row["last_scale"]) == (0.5, 1, 2.0)


def test_drift_is_drawn_where_it_was_alarmed(tmp_path):
    rows = [{"step": i, "loss": 1.0, "scale": 1.0, "gradient_norm": 2.0**-i} for i in range(4)]
    rows[2]["gradient_norm"] = None
    alarm = {"alarm": "underflow", "step": 2, "predicted": 0.1, "observed": 0.7, "message": "<i>0"}
    hand.write_log(tmp_path / "<b>run", *rows, alarm, {"stopped": "it diverged"})
    logs = {"<b>run": read_log(tmp_path / "<b>run")}
    picture = training.Trainings(str(tmp_path), logs).drift()
    same_numbers(picture, needed=["run", "step", "gradient_norm"])
    assert list(picture.frame["step"]) == [0, 1, 3]  # what was not logged is no 0
    mark = picture.figure.data[-1]
    assert (list(mark.x), mark.name) == ([2], "alarms (1)")
    assert mark.y[0] in (0.5, 0.125)  # at its neighbour's height
    assert "&lt;i&gt;0" in mark.customdata[0]
    none = training.Trainings(str(tmp_path), {}).drift()
    assert none.figure.layout.annotations[0].text == "no gradient norm was logged"
