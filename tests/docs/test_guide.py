"""The README and the guide: what their examples leave behind is what they promise."""

from __future__ import annotations

import re

import pytest
from calls import COMMANDS
from doc_pages import ran, text

import mpdiag
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_recording_and_the_plan(page):
    left = ran(page)
    assert isinstance(left.names["plan"], mpdiag.PrecisionPlan)
    assert open_run(left.folder / "runs" / "mine").meta["steps_recorded"] == 5


def test_the_findings():
    left = ran("docs/quickstart.md")
    findings = left.names["analysis"].findings
    assert [words[0] for words in left.printed[: len(findings)]] == [f.severity for f in findings]
    assert left.printed


def test_the_training_by_the_plan():
    for page, loops in (("README.md", 1), ("docs/quickstart.md", 1), ("docs/training.md", 2)):
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


def test_the_readme_is_short_and_its_table_has_every_command_and_no_other():
    assert len(text("README.md").splitlines()) <= 250
    rows = re.findall(r"^\| `mpdiag (\w+)", text("README.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)
