"""A comparison is kept in the recordings of its FP32 side, and counts for the plan that was trained."""

from __future__ import annotations

import json

import made_runs as hand
import pytest
from judged_runs import record

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.comparison.compare import compare
from mpdiag.analysis.verdict.trained import keep_comparison
from mpdiag.runs.results import COMPARISON
from mpdiag.runs.training_log import RECORDED
from mpdiag.runs.writer import RunWriter


def log(folder, metric, *head):
    lines = [*head, *({"step": s, "loss": 1.0, "scale": 1.0} for s in range(30))]
    lines.append({"metric": "accuracy", "value": metric, "higher_is_better": True})
    hand.write_log(folder, *lines)


@pytest.fixture
def sides(tmp_path):
    """Three seeds recorded in FP32, and three trained by the plan of the first."""
    for seed, metric in enumerate((0.990, 0.991, 0.992)):
        folder = record(tmp_path / "fp32" / f"seed{seed}", seeds={"torch": seed})
        log(folder, metric, RECORDED)
        plan = analyze(tmp_path / "fp32" / "seed0").plan
        trained = tmp_path / "plan" / f"seed{seed}"
        meta = {"state": "complete", "training": {"level": "O1"}, "seeds": {"torch": seed}}
        RunWriter(trained).write_meta(meta)
        plan.save(trained / "plan.json")
        log(trained, metric - 0.0001)
    return tmp_path / "fp32", tmp_path / "plan"


def keep(sides):
    return keep_comparison(compare(*sides, margin=0.01), *sides)


def test_what_was_shown_by_training_is_said_so(sides):
    assert analyze(sides[0] / "seed1").verdict.level == "expected"
    assert len(keep(sides)) == 3
    verdict = analyze(sides[0] / "seed1").verdict
    assert verdict.level == "shown"
    assert "plan (3 seeds) ended with accuracy 0.9909 beside FP32's 0.991" in verdict.text


@pytest.mark.parametrize("change", ["plans differ", "nothing ran in half precision", "no plan"])
def test_what_was_not_trained_by_one_plan_shows_nothing(sides, change):
    folder = sides[1] / "seed2"
    if change == "plans differ":
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | {"level": "O2"}))
    elif change == "no plan":
        (folder / "plan.json").unlink()
    else:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"half_precision_flops": 0.0}))
    assert keep(sides) == ()
    assert not list(sides[0].rglob(COMPARISON))


def test_sample_runs_are_left_as_they_are(root):
    sides = root / "sample_runs" / "digits", root / "sample_runs" / "digits-fp16-plan"
    assert keep_comparison(compare(*sides), *sides) == ()
