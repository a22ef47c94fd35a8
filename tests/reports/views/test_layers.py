"""Layers over the steps: what is drawn is what the recording says."""

from dataclasses import replace

import made_runs as hand
import numpy as np
import pytest
from receipt_checks import same_numbers

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layer_history import explain_layer
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views import layer_tables as tables
from mpdiag.reports.views import layers as pictures
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.runs.training_log import read_log

KIND = "activation_grad"


def layers_of(analysis):
    return in_model_order(analysis.layers.of_kind(KIND), analysis.run.modules())


def test_a_course_merges_steps_and_loses_none(analysis):
    records, layers = analysis.run.records, layers_of(analysis)
    h = layers.histograms
    lost = dict(zip(layers.names, h.lost_to_zero(FP16, 3).value / h.nonzero, strict=True))
    for most in (1, 4, 1000):
        frame = tables.course_frame(records, KIND, FP16, 3, most)
        steps = tables.recorded_steps(records, KIND)
        assert frame["first"].nunique() == min(most, len(steps))
        assert (frame["first"].min(), frame["last"].max()) == (steps[0], steps[-1])
        largest = frame.groupby("layer")["absmax"].max()
        assert all(largest[name] == top for name, top in zip(layers.names, h.absmax, strict=True))
    whole = tables.course_frame(records, KIND, FP16, 3, 1).set_index("layer")["lost_share"]
    assert whole.to_dict() == pytest.approx(lost)


def test_the_overview_has_the_figures_of_the_verdict(root):
    analysis = analyze(root / "sample_runs" / "digits")
    records = analysis.run.records
    course = tables.course_frame(records, KIND, analysis.target)
    updates = tables.update_course_frame(records)
    late = analysis.loss_scale.late
    frame = tables.overview_frame(analysis, late, course, updates, {}).set_index("layer")
    for figure in analysis.figures:
        if figure.key == "layer-sum":
            assert frame.loc[figure.layer, "sum_share"] == figure.value
        elif figure.key == "layer-values":
            assert frame.loc[figure.layer, "lost_share"] == figure.value
    parameters = set(analysis.layers.of_kind("update").names)
    for name, row in frame.iterrows():
        assert len(row["lost_course"]) == len(row["largest_course"]) <= tables.POINTS
        has = any(p.rpartition(".")[0] == name for p in parameters)
        assert bool(row["update_course"]) == has == np.isfinite(row["update_ratio"])


def test_one_layer_is_what_why_says_of_it(root):
    folder = root / "sample_runs" / "digits"
    story = explain_layer(folder, "stem")
    frame = tables.layer_course_frame(
        analyze(folder).run.records,
        KIND,
        "stem",
        FP16,
        int(np.log2(story.analysis.plan.loss_scale.recommended)),
    )
    assert np.array_equal(frame["step"], story.steps)
    assert np.array_equal(frame["lost_share"], story.lost)
    assert np.array_equal(frame["lost_share_scaled"], story.lost_scaled)
    assert np.array_equal(frame["absmax"], story.absmax)


def test_a_gradient_that_grows_by_eight_moves_by_three(tmp_path):
    run = hand.write_run(tmp_path / "run")
    records = analyze(run).run.records
    grown = records.bins.first_exponent.copy()
    mine = (records.step == 4) & (records.name == records.code("name", ""))
    grown[mine] += 3
    before = tables.movement_frame(records, KIND, 4, FP16).set_index("layer")["shift"]
    after = tables.movement_frame(
        replace(records, bins=replace(records.bins, first_exponent=grown)), KIND, 4, FP16
    )
    moved = after.set_index("layer")["shift"] - before
    assert moved[""] == pytest.approx(3)
    assert moved.drop("").abs().max() == 0


def test_the_steps_at_which_the_loss_rises(tmp_path):
    losses = [1.0] * 60
    losses[20], losses[22], losses[45], losses[50] = 9.0, 5.0, 3.0, float("nan")
    lines = ({"step": i, "loss": loss, "scale": 1.0} for i, loss in enumerate(losses))
    hand.write_log(tmp_path, *lines)
    rises = tables.loss_rises(read_log(tmp_path))
    assert list(rises["step"]) == [20, 45]  # step 22 belongs to the rise of step 20
    assert list(rises["rise"]) == [8.0, 2.0]
    picture = pictures.loss_curve(str(tmp_path), read_log(tmp_path), np.array([0, 20, 40]), 20)
    assert "The largest rise is at step 20: 8 above" in picture.caption
    assert "the 3 steps with recorded gradients" in picture.caption
    same_numbers(picture, needed=["step", "loss"])
    assert tables.nearest_step(np.array([0, 20, 40]), 31) == 40
    assert tables.nearest_step(np.array([0, 20, 40]), 30) == 20
    assert tables.nearest_step(np.array([], int), 3) is None
