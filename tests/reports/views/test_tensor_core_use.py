"""Eligible against used and the time of steps, from the stored document."""

from __future__ import annotations

import json

import pytest
from made_profiles import profile
from receipt_checks import same_numbers

from mpdiag.reports.views.tensor_core_use import (
    cause_rows,
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
    assert cause_rows(document()) == [("TF32 off: <b>", "allow it")]


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
    assert (summary_of(given), cause_rows(given)) == ([], [])
    assert use_frame(given).empty
    assert step_frame(given).empty
