"""Layers over the steps: what is drawn is what the recording says."""

import layer_course as tables
import numpy as np
import pytest
from drawn_runs import layers_of

from mpdiag.analysis.analyzer import analyze
from mpdiag.numerics.formats import FP16

KIND = "activation_grad"


def test_a_course_merges_steps_and_loses_none(analysis):
    records, layers = analysis.run.records, layers_of(analysis)
    h = layers.histograms
    lost = dict(zip(layers.names, h.lost_to_zero(FP16, 3).value / h.nonzero, strict=True))
    for most in (1, 4, 1000):
        frame = tables.course_frame(records, KIND, FP16, 3, most)
        steps = np.unique(records.step[records.of_kind(KIND)])
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


def test_layers_are_found_by_a_part_of_their_name(analysis):
    layers = layers_of(analysis, "activation_grad")
    assert len(tables.layers_named(layers, "")) == len(layers)
    assert list(tables.layers_named(layers, "THE MODEL").names) == [""]
    assert len(tables.layers_named(layers, "no such layer")) == 0
