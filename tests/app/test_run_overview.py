"""The overview of a run: what its pictures and sentences say."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import run_overview as overview

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import stack
from mpdiag.plan import FILE as PLAN
from mpdiag.reports.views.gradients.frame import in_model_order, scale_frame
from mpdiag.reports.views.gradients.pictures import Gradients
from mpdiag.reports.views.training import Trainings
from mpdiag.runs.results import COMPARISON
from mpdiag.runs.training_log import FINAL_WORDS, Metric, TrainingLog, TrainingStep


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


def test_the_worst_layer_before_and_after(gradients, ssd):
    before, after = overview.worst_layer(gradients, ssd.plan.loss_scale)
    worst = ssd.figures.find("layer-sum")
    rows = scale_frame(gradients.layers, FP16, 0).set_index("layer").loc[worst.layer]
    assert before.title == f"{worst.layer} without a loss scale"
    assert f"{percent(rows['lost_share'])} of its values become 0" in before.caption
    assert f"{percent(worst.value)} of its gradient" in before.caption
    assert before.figure.layout.xaxis.range == after.figure.layout.xaxis.range
    for picture, exponent in ((before, 0), (after, 6)):
        h = gradients.layers.histograms[gradients.names.index(worst.layer)]
        error = percent(float(rounding_error(stack([h]), FP16, exponent)[0]))
        assert picture.figure.layout.title.text == f"Rounding moves {worst.layer} by {error}."
        assert sum(sum(bar.y) for bar in picture.figure.data) == pytest.approx(1)
    assert "At 64 gradients may grow 2,048 times before FP16 overflows; at 131,072" in after.caption
    no_scale = replace(ssd.plan.loss_scale, recommended=1.0)
    assert len(overview.worst_layer(gradients, no_scale)) == 1


def test_a_tile_says_how_a_training_ended():
    accuracy = [Metric("accuracy", 0.875)]
    logs = {"a": log([1.0], accuracy), "a-fp16-plan": log([1.0], [Metric("accuracy", 0.25)])}
    logs["other"] = log([1.0], [Metric("loss of the test", 1.0)])
    trained = {"a-fp16-plan": "FP16 by the plan", "other": "FP16"}
    for answer, value, note, tone in (
        ("as FP32 (one seed)", "0.25 ✓", "as FP32 (one seed)", "green"),
        ("worse (one seed)", "0.25 ✗", "worse (one seed)", "red"),
        ("undecided (one seed)", "0.25", "undecided (one seed)", "gray"),
        ("", "0.25", "not compared", "gray"),
    ):
        first, second = overview.tiles(logs, trained, {"a-fp16-plan": answer})
        assert first == overview.Tile("a", "accuracy in FP32", "0.875", "reference")
        label = "accuracy in FP16 by the plan"
        assert second == overview.Tile("a-fp16-plan", label, value, note, tone)
    assert overview.tiles({"a": logs["a"], "other": logs["other"]}, trained, {}) == ()
    assert overview.tiles({"a": log([1.0])}, trained, {}) == ()


def test_a_script_without_a_metric_has_tiles_of_its_final_loss():
    """It is the same figure as in ``mpdiag compare``: the mean of the last twentieth of the steps."""
    falls = [40.0 - i for i in range(40)]
    logs = {"a": log(falls), "a-fp16-plan": log([*falls[:38], 9.0, 3.0])}
    answers = {"a-fp16-plan": "worse (one seed)"}
    one, two = overview.tiles(logs, {"a-fp16-plan": "FP16 by the plan"}, answers)
    assert (one.label, one.value, one.meaning) == ("final loss in FP32", "1.5", FINAL_WORDS)
    assert (two.label, two.value) == ("final loss in FP16 by the plan", "6 ✗")
    assert f"Final loss ({FINAL_WORDS}): a 1.5, a-fp16-plan 6." in overview.losses("", logs).caption
    assert list(Trainings("", logs).outcomes()["final_loss"]) == [1.5, 6.0]


def test_how_a_training_was_trained():
    said = overview.how_trained
    assert said("FP16", log([1.0]), by_the_plan=True) == "FP16 by the plan"
    assert said("FP16", log([1.0]), by_the_plan=False) == "FP16 without a scale"
    scaled = TrainingLog((TrainingStep(0, 1.0, 128.0),), ())
    assert said("FP16", scaled, by_the_plan=False) == "FP16 at a scale of 128"
    backoff = TrainingLog((TrainingStep(0, 1.0, 128.0), TrainingStep(1, 1.0, 64.0)), ())
    assert said("FP16", backoff, by_the_plan=False) == "FP16"


def test_losses_beside_each_other(gradients):
    logs = {
        "a": log([9.0, 1.0, 0.5], [Metric("accuracy", 0.75)]),
        "a-fp16-plan": log([9.0, 1.0, math.inf], [Metric("accuracy", 0.5)], skipped=True),
    }
    picture = overview.losses("runs", logs)
    assert picture.figure.layout.yaxis.type == "log"
    assert picture.caption == (
        f"Final loss ({FINAL_WORDS}): a 0.5. accuracy: a 0.75, a-fp16-plan 0.5. "
        "Skipped steps: a-fp16-plan 3."
    )
    narrow = overview.losses("runs", {"a": log([2.0, 3.0])})
    assert narrow.figure.layout.yaxis.type == "linear"  # a log axis would have no number on it
    assert overview.losses("runs", {}).caption == ""


def test_the_next_commands_can_be_run(ssd, tmp_path):
    compared = overview.next_steps(ssd, None)
    assert [step.command.split()[1] for step in compared] == ["analyze"]
    shutil.copytree(ssd.run.folder, tmp_path / "ssd", ignore=shutil.ignore_patterns(COMPARISON))
    first = overview.next_steps(analyze(tmp_path / "ssd"), None)
    assert [step.command.split()[1] for step in first] == ["analyze", "why"]
    assert all(step.reason != "Next" for step in first)
    settle = ("mpdiag", "analyze", "a b", "--probe", "--", "train.py")
    (step,) = overview.steps_of([(), settle, settle])
    assert step.command == "mpdiag analyze 'a b' --probe -- train.py"
    assert step.reason.startswith("Settle it")
    assert overview.training_steps(ssd.run.folder, ssd.run.folder) == ()  # all was done
    (tmp_path / "ssd" / PLAN).unlink()
    (after,) = overview.training_steps(tmp_path / "ssd-fp16", tmp_path / "ssd")
    assert after.command.split()[1] == "analyze"
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
