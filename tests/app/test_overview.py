"""The overview of each kind of run, and the verdict."""

from __future__ import annotations

import pytest
from app_pages import commands, metrics, titles, words

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def test_an_overview_has_all_that_decides(opened):
    test = opened(view="overview", run="ssd")
    text = words(test).replace("\\", "")
    assert "with a loss scale of 64" in test.warning[0].value
    shown = ["Without a loss scale", "With a loss scale of 64", "Loss", "Findings", "Run next"]
    assert [title for title in titles(test) if title in shown] == shown
    assert "ssd-fp16-no-scale 0.175" in text  # the metric of each training, beside FP32's
    folds = [one.label.replace("\\", "") for one in test.expander]
    assert sum("FP16 loses 26.82 %" in label for label in folds) == 1
    assert any("39 of 400 steps recorded, 26 of 28 modules seen" in label for label in folds)
    assert "Not recorded: norms, heads (never called in a recorded step)." in text
    assert [c.split()[:2] for c in commands(test)] == [["mpdiag", "why"], ["mpdiag", "compare"]]


def test_an_overview_of_each_kind_of_run(opened):
    test = opened(view="overview", run="ssd-fp16-plan")
    said = test.info[0].value.replace("\\", "")
    assert "Trained in FP16, O1, emulated: 400 steps, none skipped." in said
    assert "mAP@0.5 0.8435, beside 0.8453 in the recording." in said
    assert any(command.startswith("mpdiag compare") for command in commands(test))
    assert metrics(opened(view="overview", run="gpu-sample"))["On Tensor Cores"] == "86.50 %"


@pytest.mark.parametrize("view", ["overview", "verdict"])
def test_a_training_by_a_plan_leads_on_to_its_recording(opened, view):
    test = opened(view=view, run="ssd-fp16-plan")
    assert not test.exception
    assert not test.error
    assert any(
        '"Training"' in str(link.proto) or "Scale" in str(link.proto)
        for link in test.get("page_link")
    )
    (button,) = (one for one in test.button if "The recording ssd" in one.label)
    test = button.click().run()
    assert test.sidebar.selectbox[0].value == "ssd"
    assert "with a loss scale of 64" in test.warning[0].value


def test_a_finding_expands_to_what_it_means(opened):
    shown = opened(view="verdict", run="ssd").expander
    assert "What loss-scale-needed means" in {one.label for one in shown}
