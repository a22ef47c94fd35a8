"""What a list says of a run without an analysis: exact where it says something, silent elsewhere."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from glance import LARGEST, Glance, PlanGlance, read_glance, sparkline

from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.results import StoredComparison, write_comparison


def test_a_glance_at_a_training(root):
    folder = root / "sample_runs" / "ssd-fp16-plan"
    seen = read_glance(folder)
    assert (seen.steps, seen.skipped, seen.unread) == (400, 0, ())
    assert [(m.metric, round(m.value, 4)) for m in seen.metrics] == [("mAP@0.5", 0.8457)]
    assert seen.size == sum(path.stat().st_size for path in folder.iterdir())
    plan = PrecisionPlan.load(folder / PLAN)
    told = replace(plan.verdict, evidence=(), not_examined=())
    assert seen.plan == PlanGlance.of(replace(plan, verdict=told))


def test_a_glance_at_a_recording_and_a_profile(root):
    plan = read_glance(root / "sample_runs" / "ssd").plan
    assert (plan.need, plan.scale, plan.target) == ("needed", 64.0, "fp16")
    assert 0.8 < read_glance(root / "sample_runs" / "gpu-sample").tensor_cores < 0.9


def test_what_cannot_be_read_is_named(tmp_path):
    assert read_glance(tmp_path) == Glance()
    (tmp_path / "plan.json").write_text("{")
    (tmp_path / "training.jsonl").write_text('{"step": 0, "loss": 1.0, "scale": 1.0}\n[]\n{}\n')
    (tmp_path / "profile.json").write_text(" " * (LARGEST + 1))
    seen = read_glance(tmp_path)
    assert set(seen.unread) == {"plan.json", "training.jsonl", "profile.json"}
    assert (seen.plan, seen.steps, seen.tensor_cores) == (None, None, None)


@pytest.mark.parametrize(
    "document", [{"verdict": 3}, {"verdict": "x"}, {"verdict": {}, "loss_scale": {}}]
)
def test_a_plan_of_another_shape_is_no_verdict(tmp_path, document):
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert read_glance(tmp_path).plan is None


def test_a_comparison_is_told_of_the_training_that_was_compared(root, tmp_path):
    for name in ("ssd", "ssd-fp16-plan"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    followed = PrecisionPlan.load(tmp_path / "ssd-fp16-plan" / PLAN)
    for digest, expected in ((followed.digest(), ("ssd-fp16-plan", "equivalent")), ("other", None)):
        kept = StoredComparison("ssd-fp16-plan", digest, "equivalent")
        write_comparison(tmp_path / "ssd", kept)
        assert read_glance(tmp_path / "ssd").compared == expected


def test_a_sparkline_is_of_medians_in_order():
    assert sparkline([]) == ()
    assert sparkline([3.0, 1.0]) == (3.0, 1.0)
    assert sparkline([1.0, 9.0, 1.0, 4.0, 4.0, math.inf], points=2) == (1.0, 4.0)
    assert sparkline([math.nan]) == ()
    assert len(sparkline([1.0] * 1001)) == 60
