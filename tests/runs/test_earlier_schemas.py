"""What earlier versions wrote stays readable: a stored folder of every schema, never written anew.

``tests/data/schema-N`` was written by the first version with schema N (``record_run`` and its
neighbours in ``studies/fuzz.py``). A newer schema adds a folder; none is ever replaced.
"""

from __future__ import annotations

import json

import pytest

import mpdiag
from mpdiag.analysis.comparison.compare import compare
from mpdiag.reports.views.tensor_cores import kernel_frame
from mpdiag.runs.run import SCHEMA_VERSION
from mpdiag.runs.stored_profile import read_profile
from mpdiag.runs.training_log import read_log
from mpdiag.sensitivity.search_state import load_state


@pytest.fixture
def first(root):
    return root / "tests" / "data" / "schema-1"


def test_every_schema_has_its_folder(root):
    stored = {path.name for path in (root / "tests" / "data").glob("schema-*")}
    assert stored == {f"schema-{version}" for version in range(1, SCHEMA_VERSION + 1)}


def test_a_run_of_schema_1_holds_what_was_written(first):
    run = mpdiag.open_run(first / "run")
    records = run.records
    assert (run.meta["schema_version"], run.meta["state"], len(records)) == (1, "complete", 78)
    assert (int(records.numel.sum()), int(records.zeros.sum())) == (2259, 12)
    assert float(records.absmax.max()) == 2.2288901805877686
    assert float(records.absmin.min()) == 5.599856376647949e-05
    names = [row["name"] for row in run.modules() if row["what"] == "module"]
    assert names == ["", "0", "1", "2"]
    assert len(run.operations()) == 16
    assert len(read_log(run.folder).steps) == 6


def test_what_was_concluded_from_it_reads_and_is_still_concluded(first):
    analysis = mpdiag.analyze(first / "run")
    plan = mpdiag.PrecisionPlan.load(first / "run" / "plan.json")
    assert plan.loss_scale.recommended == analysis.plan.loss_scale.recommended == 1.0
    assert (plan.target, plan.level) == ("fp16", "O1")
    assert plan.run == "run"
    assert {c.module for c in plan.fp32_modules} == {c.module for c in analysis.plan.fp32_modules}


def test_profiles_baselines_and_searches_of_version_1_read(first):
    profile = read_profile(first / "run")
    assert kernel_frame(profile)["time_us"].sum() == pytest.approx(profile["kernel_time_us"])
    assert compare(first / "baseline.json", first / "run").a.trainings[0].metrics["accuracy"] == 0.9
    key = json.loads((first / "search.json").read_text())["key"]
    assert len(load_state(first / "search.json", key).probes) == 1
