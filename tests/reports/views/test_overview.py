"""The overview of a run: what its pictures and sentences say."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views import overview
from mpdiag.reports.views.gradients.frame import in_model_order, scale_frame
from mpdiag.reports.views.gradients.pictures import Gradients
from mpdiag.runs.training_log import Metric, TrainingLog, TrainingStep


@pytest.fixture(scope="module")
def ssd(root):
    return analyze(root / "sample_runs" / "ssd")


@pytest.fixture(scope="module")
def gradients(ssd):
    late = in_model_order(ssd.loss_scale.late, ssd.run.modules())
    whole = ssd.layers.of_kind("activation_grad")
    return Gradients("runs/ssd", "activation_grad", late, FP16, ssd.loss_scale.window, whole)


def log(losses, metrics=(), **facts):
    steps = (TrainingStep(i, loss, 1.0, **facts) for i, loss in enumerate(losses))
    return TrainingLog(tuple(steps), tuple(metrics))


def test_before_and_after_say_what_is_lost(gradients):
    before, after = overview.before_and_after(gradients, 64.0)
    assert before.figure.layout.xaxis.range == after.figure.layout.xaxis.range
    assert before.figure.layout.height == after.figure.layout.height == overview.MAP_HEIGHT
    assert len(overview.before_and_after(gradients, 1.0)) == 1
    assert "layers overflow" in overview.lost_words(gradients, 34, few=26)


def test_a_click_on_a_row_selects_its_layer_whole_names_included(gradients):
    for picture in overview.before_and_after(gradients, 64.0, clickable=True):
        (rows,) = (trace for trace in picture.figure.data if trace.type == "bar" and trace.width)
        assert list(rows.customdata) == [str(name) for name in gradients.layers.names]


def test_a_small_map_draws_the_layers_that_lose_or_exceed_most(gradients):
    few = overview.notable(gradients.layers, 6)
    frame = scale_frame(gradients.layers, FP16, 0)
    assert frame["layer"][frame["sum_share"].idxmax()] in few.names
    assert frame["layer"][frame["absmax"].idxmax()] in few.names
    order = list(gradients.layers.names)
    assert list(few.names) == sorted(few.names, key=order.index)
    assert "6 of 26 layers are drawn." in overview.lost_words(gradients, 0, few=6)


def test_no_gradients_no_picture(gradients):
    none = replace(gradients, layers=gradients.layers.of_kind("update"))
    assert overview.before_and_after(none, 64.0) == ()


def test_losses_beside_each_other(gradients):
    logs = {
        "a": log([9.0, 1.0, 0.5], [Metric("accuracy", 0.75)]),
        "a-fp16-plan": log([9.0, 1.0, math.inf], [Metric("accuracy", 0.5)], skipped=True),
    }
    picture = overview.losses("runs", logs)
    assert picture.figure.layout.yaxis.type == "log"
    assert picture.caption == (
        "Median loss of the last 15 steps: a 1, a-fp16-plan 5. accuracy: a 0.75, a-fp16-plan 0.5. "
        "Skipped steps: a-fp16-plan 3."
    )
    narrow = overview.losses("runs", {"a": log([2.0, 3.0])})
    assert narrow.figure.layout.yaxis.type == "linear"  # a log axis would have no number on it
    assert overview.losses("runs", {}).caption == ""


def test_the_next_commands_can_be_run(ssd):
    first = overview.next_steps(ssd, planned=False)
    assert [step.command.split()[1] for step in first] == ["analyze", "why"]
    assert all(step.reason != "Next" for step in first)
    settle = ("mpdiag", "analyze", "a b", "--probe", "--", "train.py")
    (step,) = overview.steps_of([(), settle, settle])
    assert step.command == "mpdiag analyze 'a b' --probe -- train.py"
    assert step.reason.startswith("Settle it")
    after = overview.training_steps(ssd.run.folder, ssd.run.folder)
    assert [step.command.split()[1] for step in after] == ["compare", "analyze"]
    assert overview.profile_steps(Path("gone.json")) == ()


def test_what_is_known_of_a_training():
    said = overview.training_words
    assert said({"state": "complete"}, None, "FP16") == "Trained in FP16; no step was logged."
    going = said({"state": "training"}, log([1.0, np.nan], skipped=True), "BF16")
    assert going == (
        "A training (training) in BF16: 2 steps, 2 skipped; its last loss is not finite."
    )


def test_the_findings_of_a_profile_are_findings():
    (found,) = overview.profile_findings({"findings": [{"severity": "odd", "message": "m"}]})
    assert (found.severity, found.code, found.message, found.fix) == ("info", "", "m", "")
