"""The list of runs."""

from __future__ import annotations

import shutil

import pytest
from app_pages import words

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def table_of(test):
    return next(t.value for t in test.dataframe if "verdict" in t.value)


def test_the_list_says_what_lies_in_each_folder(opened, root, tmp_path):
    for name in ("ssd", "ssd-fp16-plan", "gpt", "gpu-sample"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    (tmp_path / "gpt" / "plan.json").unlink()
    test = opened(tmp_path)
    rows = table_of(test).set_index("run")
    assert list(rows.index) == ["gpu-sample", "gpt", "ssd", "ssd-fp16-plan"]
    assert ", 4 shown" not in words(test)
    verdicts = rows["verdict"].map(lambda words: words[0])
    assert list(verdicts) == ["86 % Tensor Cores", "not analyzed", "needs scale 64", "not compared"]
    assert rows["mark"]["ssd-fp16-plan"] == "↳"
    assert rows["format"]["ssd-fp16-plan"] == "FP16, O1, emulated"
    assert rows["metric"]["ssd"] == "0.8453 mAP@0.5"
    assert list(rows["skipped"].dropna()) == [0, 0, 0]
    assert 2 < len(rows["losses"]["ssd"]) <= 60
    found = test.text_input(key="filter").set_value("detector").run()
    assert list(table_of(found)["run"]) == ["ssd", "ssd-fp16-plan"]
    assert ", 2 shown" in words(found)
    assert "No run here matches" in words(test.text_input(key="filter").set_value("xyz").run())
    assert list(table_of(opened(tmp_path, kinds="Profiles"))["run"]) == ["gpu-sample"]
    test = opened(tmp_path, "overview", run="gpt")  # which analyzes it
    seen = table_of(test.switch_page("views/runs.py").run()).set_index("run")["verdict"]
    assert seen["gpt"] == ["needs no scale"]


def test_sample_runs_come_after_one_s_own_and_only_if_asked_for(opened, root, tmp_path):
    for name in ("ssd", "digits"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    assert not any("sample/" in name for name in table_of(opened(tmp_path))["run"])
    test = opened(tmp_path, samples="true", run="sample/ssd")
    names = list(table_of(test)["run"])
    assert [name.startswith("sample/") for name in names] == [
        False,
        False,
        *[True] * (len(names) - 2),
    ]
    assert test.sidebar.selectbox[0].value == "sample/ssd"
    test = test.switch_page("views/overview.py").run()
    assert not test.exception
    (drawn,) = (block.value for block in test.code if "training.jsonl" in block.value)
    assert f"{root / 'sample_runs'}" in drawn  # the receipt reads the sample, not one's own run
    assert "'ssd-fp16-plan'" in drawn
    assert not opened(samples="true").sidebar.toggle  # nothing to add to the sample runs themselves
