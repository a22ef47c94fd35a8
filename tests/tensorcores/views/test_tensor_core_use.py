"""Eligible against used and the time of steps, from the stored document."""

from __future__ import annotations

import json

import pytest
from made_profiles import profile
from receipt_checks import same_numbers

from mpdiag.tensorcores.views.tensor_core_use import (
    cause_frame,
    causes,
    step_frame,
    summary_of,
    use_frame,
    use_pictures,
)


def document():
    rows = profile()["operations"]
    flags = [
        {"eligible": True, "used": True, "tflops": 200.0, "peak_share": 0.5, "phase": "forward"},
        {"eligible": None, "used": None, "tflops": None, "peak_share": None},
        {"eligible": False, "used": False},
    ]
    times = {"tensor_core": 60.0, "layout": 10.0, "helper": 5.0, "other": 3.0}
    steps = [
        {"name": str(i), "wall_us": 100.0, "idle_us": 22.0, "kernel_us": times} for i in (3, 4)
    ]
    return profile() | {
        "operations": [row | more for row, more in zip(rows, flags, strict=True)],
        "summary": ["Eligible: 60 %", "2 steps: 0.1 ms"],
        "causes": [{"sentence": "TF32 off: <b>", "fix": "allow it"}],
        "timeline": {"steps": steps},
    }


def test_every_number_and_its_receipt(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(document()))
    used, steps = use_pictures(str(tmp_path), document())
    same_numbers(used, needed=("op", "module", "time_us", "share"))
    same_numbers(steps, needed=("step", "wall_us", "idle"))
    assert list(used.frame["use"]) == ["used", "eligibility unknown"]
    assert used.caption.startswith("The 2 longest of 2 operations")
    assert summary_of(document())[0] == "Eligible: 60 %"
    assert steps.frame.iloc[0][["tensor_core", "other", "idle"]].tolist() == [60.0, 18.0, 22.0]
    assert "<i>" not in used.figure.to_json().replace("\\u003c", "<")


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"timeline": None, "summary": None, "causes": None},
        {"timeline": {"steps": [None, {}, {"kernel_us": 3}]}, "summary": [3], "causes": [None]},
    ],
)
def test_older_and_odd_documents_show_nothing(odd):
    given = profile() | odd
    assert list(use_pictures(".", given)) == []
    assert summary_of(given) == []
    assert use_frame(given).empty
    assert step_frame(given).empty


def test_causes_are_grouped_with_one_bound_each_and_their_receipt(tmp_path):
    groups = [
        {"cause": "tf32_off", "label": "TF32 off", "operations": 5, "fraction": 0.62}
        | {"amdahl_bound": 1 / 0.38, "fix": "allow <b>TF32</b>"}
    ]
    found = document() | {"causes": groups}
    (tmp_path / "profile.json").write_text(json.dumps(found))
    picture = causes(str(tmp_path), found)
    same_numbers(picture, needed=("operations", "share", "bound"))
    (label,) = [note.text for note in picture.figure.layout.annotations]
    assert label == "<b>TF32 off</b><br>5 operations, 62.0 %, at most 2.63×"
    assert "allow &lt;b&gt;" in picture.figure.data[0].customdata[0]
    assert "Together 62.0 %; without all of it at most 2.63×" in picture.caption


def test_causes_of_a_document_without_groups_are_summed(root):
    stored = json.loads((root / "sample_runs" / "digits" / "profile.json").read_text())
    picture = causes(str(root / "sample_runs" / "digits"), stored)
    same_numbers(picture, needed=("operations", "share", "bound"))
    (row,) = picture.frame.to_dict("records")
    assert (row["cause"], row["operations"]) == ("not matrix work", 221)
    outside = sum(o["time_us"] for o in stored["operations"] if o["cause"] == "outside")
    assert row["share"] == pytest.approx(outside / stored["kernel_time_us"])
    assert cause_frame({}).empty


def test_idle_time_of_a_step_by_cause():
    steps = document()["timeline"]["steps"]
    steps[0]["idle_causes"] = {"host": {"time_us": 20.0}, "wait": {"time_us": 2.0}}
    frame = step_frame({"timeline": {"steps": steps}})
    assert frame.iloc[0][["idle_host", "idle_wait", "idle_unknown"]].tolist() == [20.0, 2.0, 0.0]
    assert frame.iloc[1][["idle_host", "idle_unknown"]].tolist() == [0.0, 22.0]
