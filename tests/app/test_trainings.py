"""Trainings by a plan: beside each other, against their recording, against what the plan foretold."""

from __future__ import annotations

import json
import shutil

import pytest
from app_pages import words

from mpdiag.analysis.comparison.compare import compare
from mpdiag.reports.views.overview import command_text

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def pair(test):
    return [box.value for box in test.selectbox if box.key in ("a", "b")]


def test_only_related_runs_are_compared_unasked(opened, root, tmp_path):
    test = opened(view="compare", run="ssd")
    assert pair(test) == ["ssd", "ssd-fp16-plan"]
    assert test.multiselect(key="beside").value == ["ssd-fp16-no-scale"]
    assert "ssd\\-fp16\\-plan against ssd" in words(test)
    assert "one seed on a side shows no spread" in words(test)
    pasted = command_text(
        ("mpdiag", "compare", *(root / "sample_runs" / name for name in pair(test)))
    )
    assert f"`{pasted} --margin NAME=VALUE`" in words(test)  # with the folder, not the names alone
    assert "hold" in words(test)  # no statistics of the training by a plan
    assert pair(opened(view="compare", run="ssd-fp16-no-scale")) == ["ssd", "ssd-fp16-no-scale"]
    for name in ("ssd", "ssd-2", "digits"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    test = opened(tmp_path, view="compare", run="ssd")
    assert pair(test) == ["ssd", "ssd-2"]  # of one model
    assert len(test.get("plotly_chart")) == 3  # losses, intervals, layers
    alone = opened(tmp_path, view="compare", run="digits")
    assert "No run here is related to digits" in words(alone)
    asked = opened(tmp_path, view="compare", run="digits", a="digits", b="ssd")
    assert not asked.exception
    assert "two different models" in asked.warning[0].value


def test_folders_of_seeds_are_compared_as_the_command_does(opened, root, tmp_path):
    for side, source, moved in (("fp32", "ssd", 0.0), ("fp16", "ssd-fp16-plan", 0.0005)):
        for seed in range(3):
            run = tmp_path / side / f"seed{seed}"
            run.mkdir(parents=True)
            meta = json.loads((root / "sample_runs" / source / "meta.json").read_text())
            (run / "meta.json").write_text(json.dumps(meta | {"seeds": {"torch": seed}}))
            log = [{"step": i, "loss": 1 / (i + 1), "scale": 1.0} for i in range(3)]
            log += [{"metric": "accuracy", "value": 0.9 + moved + seed / 1e3}]
            (run / "training.jsonl").write_text("".join(json.dumps(x) + "\n" for x in log))
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "digits")
    test = opened(tmp_path, view="compare", a="fp32", b="fp16")
    assert not test.exception
    assert "equivalent]" in words(test)
    assert compare(tmp_path / "fp32", tmp_path / "fp16").verdict == "equivalent"
    table = next(t.value for t in test.dataframe if "seeds" in t.value)
    assert list(table["seeds"]) == [3, 3]
    assert list(table["trained in"]) == ["FP32 recording", "FP16, level O1"]


def test_trainings_that_claim_half_precision_and_ran_in_none_are_no_comparison(
    opened, root, tmp_path
):
    for name in ("ssd", "ssd-2"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    meta = json.loads((tmp_path / "ssd-2" / "meta.json").read_text())
    training = {"dtype": "float16", "level": "O1"}
    claims = {**meta, "training": training, "half_precision_flops": 0.0}
    (tmp_path / "ssd-2" / "meta.json").write_text(json.dumps(claims))
    test = opened(tmp_path, "compare", run="ssd", a="ssd", b="ssd-2")
    assert not test.exception
    assert "claims float16, and none of its matrix products ran in it" in test.error[0].value
    assert not test.get("plotly_chart")
    test = opened(tmp_path, "training", run="ssd-2", trainings="ssd-2")
    assert "none of its matrix products ran in it" in test.error[0].value


def test_a_training_is_held_against_the_plan_that_it_followed(opened):
    test = opened(view="training", run="ssd")
    said = next(t.value for t in test.dataframe if "predicted" in t.value)
    assert set(said["run"]) == {"ssd-fp16-plan"}
    assert list(said["predicted"]) == ["128", "< 0.01 %", "131,072"]
    text = words(test).replace("\\", "")
    assert "ssd-fp16-no-scale began at a loss scale of 1, and the plan in its folder at 128" in text
    assert "source recording" not in text
