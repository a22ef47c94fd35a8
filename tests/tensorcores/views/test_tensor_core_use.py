"""Eligible against used and the time of steps, from the stored document."""

from __future__ import annotations

import json

import pytest
from made_profiles import profile, profile_with_use

from mpdiag.tensorcores.views.tensor_core_use import (
    cause_frame,
    causes,
    step_frame,
    summary_of,
    use_frame,
    use_pictures,
)


def test_every_number():
    document = profile_with_use()
    used, steps = use_pictures(".", document)
    assert list(used.frame["use"]) == ["used", "eligibility unknown"]
    assert used.caption.startswith("The 2 longest of 2 operations")
    assert summary_of(document)[0] == "Eligible: 60 %"
    assert steps.frame.iloc[0][["tensor_core", "other", "idle"]].tolist() == [60.0, 18.0, 22.0]


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


def test_causes_are_grouped_with_one_bound_each():
    picture = causes(".", profile_with_use())
    (label,) = [note.text for note in picture.figure.layout.annotations]
    assert label == "<b>TF32 off</b><br>5 operations, 62.0 %, at most 2.63×"
    assert "allow &lt;b&gt;" in picture.figure.data[0].customdata[0]
    assert "Together 62.0 %; without all of it at most 2.63×" in picture.caption


def test_causes_of_a_document_without_groups_are_summed(root):
    stored = json.loads((root / "sample_runs" / "digits" / "profile.json").read_text())
    picture = causes(str(root / "sample_runs" / "digits"), stored)
    (row,) = picture.frame.to_dict("records")
    assert (row["cause"], row["operations"]) == ("not matrix work", 221)
    outside = sum(o["time_us"] for o in stored["operations"] if o["cause"] == "outside")
    assert row["share"] == pytest.approx(outside / stored["kernel_time_us"])
    assert cause_frame({}).empty


def test_idle_time_of_a_step_by_cause():
    steps = profile_with_use()["timeline"]["steps"]
    steps[0]["idle_causes"] = {"host": {"time_us": 20.0}, "wait": {"time_us": 2.0}}
    frame = step_frame({"timeline": {"steps": steps}})
    assert frame.iloc[0][["idle_host", "idle_wait", "idle_unknown"]].tolist() == [20.0, 2.0, 0.0]
    assert frame.iloc[1][["idle_host", "idle_unknown"]].tolist() == [0.0, 22.0]
