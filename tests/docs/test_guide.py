"""The pages of the guide: what their examples leave behind is what they promise."""

from __future__ import annotations

from pages import ran

import mpdiag
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log


def test_the_recording_and_the_plan():
    left = ran("docs/quickstart.md")
    assert isinstance(left.names["plan"], mpdiag.PrecisionPlan)
    run = open_run(left.folder / "runs" / "mine")
    assert run.meta["steps_recorded"] == 5
    findings = left.names["analysis"].findings
    assert [words[0] for words in left.printed[: len(findings)]] == [f.severity for f in findings]
    assert left.printed


def test_the_training_by_the_plan():
    for page, loops in (("docs/quickstart.md", 1), ("docs/training.md", 2)):
        left = ran(page)
        assert left.names["result"].scale == left.names["plan"].loss_scale.init_scale
        assert len(read_log(left.folder / "runs" / "mine-fp16").steps) == 4 * loops


def test_shapes():
    left = ran("docs/analysis.md")
    advice = mpdiag.analyze(left.folder / "runs" / "mine").plan.shapes
    assert [words[1] for words in left.printed if len(words) == 5] == [a.dimension for a in advice]
    assert advice


def test_what_ran_where():
    printed = ran("docs/tensor-cores.md").printed
    assert "unit" in printed[-1][0] or "Tensor Core" in printed[-1][0]


def test_the_search_leaves_a_plan():
    left = ran("docs/sensitivity.md")
    assert mpdiag.PrecisionPlan.load(left.folder / "plan.json") == left.names["found"].plan
