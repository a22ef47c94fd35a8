"""The list of runs: badges, order, filter."""

import math

import pytest
from glance import Glance, PlanGlance
from run_list import (
    Badge,
    Listed,
    badges,
    family,
    format_of,
    grouped,
    marks,
    matches,
    places,
    runs_frame,
)

from mpdiag.plan import Verdict
from mpdiag.runs.run import Listing, Run


def listed(tmp_path, name="run", *, glance=None, live=False, called=None, **meta):
    run = Listing(tmp_path / name, Run(tmp_path / name, meta), None)
    return Listed(run, called or name, glance or Glance(), "complete", live)


def planned(need, level="expected", scale=64.0, target="fp16"):
    return Glance(plan=PlanGlance(Verdict(level, "…"), target, need, scale))


@pytest.mark.parametrize(
    ("glance", "expected"),
    [
        (Glance(), Badge("not analyzed")),
        (planned("needed"), Badge("needs scale 64", "careful")),
        (planned("advisable"), Badge("scale 64 advised", "good")),
        (planned("not needed"), Badge("needs no scale", "good")),
        (planned("not needed", "shown"), Badge("needs no scale, shown", "good")),
        (planned("needed", "cannot"), Badge("cannot train so", "bad")),
        (planned("not needed", target="fp8-row"), Badge("plan for FP8 by rows", "good")),
        (planned("what else"), Badge("not known")),
    ],
)
def test_the_badge_of_a_recording(tmp_path, glance, expected):
    assert listed(tmp_path, glance=glance).badge() == expected


@pytest.mark.parametrize(
    ("glance", "compared", "words"),
    [
        (Glance(last_loss=1.0), None, "not compared"),
        (Glance(last_loss=math.inf), "equivalent", "loss not finite"),
        (Glance(stopped="8 steps in a row"), None, "stopped"),
        (Glance(last_loss=1.0), "equivalent", "equivalent to FP32"),
        (Glance(last_loss=1.0), "different", "different from FP32"),
        (Glance(last_loss=1.0), "inconclusive", "undecided"),
    ],
)
def test_the_badge_of_a_training(tmp_path, glance, compared, words):
    for live, said in ((False, words), (True, "in progress")):
        row = listed(tmp_path, glance=glance, live=live, training={"level": "O1"})
        assert row.badge(compared).words == said


def test_what_a_comparison_said_stands_beside_the_training(tmp_path):
    compared = Glance(compared=("a-fp16-plan", "equivalent"))
    for before in ("", "sample/"):
        runs = [
            listed(tmp_path, "a", glance=compared, called=f"{before}a"),
            listed(tmp_path, called=f"{before}a-fp16-plan", training={"level": "O1"}),
        ]
        assert list(runs_frame(runs)["verdict"]) == ["not analyzed", "equivalent to FP32"]
        assert [badge.tone for badge in badges(runs)] == ["plain", "good"]


def test_an_answer_counts_where_no_comparison_is_kept(tmp_path):
    kept = Glance(compared=("a-fp16-plan", "different"))
    runs = [
        listed(tmp_path, "a", glance=kept),
        *(listed(tmp_path, f"a-fp16-{way}", training={"level": "O1"}) for way in ("plan", "x")),
    ]
    answers = dict.fromkeys(("a-fp16-plan", "a-fp16-x"), "as FP32 (one seed)")
    said = [badge.words for badge in badges(runs, answers)]
    assert said == ["not analyzed", "different from FP32", "as FP32 (one seed)"]


def test_a_run_has_one_place_among_those_of_its_model(tmp_path):
    names = ["b-fp16-plan", "a-2", "b", "a-fp16-no-scale", "a", "a-fp16-plan"]
    runs = [listed(tmp_path, name, model={"type": name[0]}).listing for name in names]
    expected = {"a": 0, "a-fp16-plan": 1, "a-fp16-no-scale": 2, "a-2": 3}
    assert places(runs) == expected | {"b": 0, "b-fp16-plan": 1}


def test_what_a_meta_json_does_not_say_is_empty(tmp_path):
    odd = listed(tmp_path, model=3, device=[], created=7, steps_seen="many", training=None)
    torn = Listed(Listing(tmp_path / "torn", None, "damaged"), "torn")
    frame = runs_frame([odd, torn])
    assert list(frame["kind"]) == ["recording", "unreadable"]
    assert frame["steps"].isna().all()
    assert list(frame["model"]) == ["", ""]


def test_the_format_and_level_of_a_training():
    training = {"dtype": "bf16", "level": "O2", "backend": "native"}
    assert format_of({"training": training}) == "BF16, O2"
    assert format_of({"training": {"dtype": "float16"}}) == "float16"
    assert format_of({}) == ""


def test_trainings_follow_their_recording():
    names = ["b-fp16-plan", "b", "a-fp16-x", "c", "d-fp16-plan", "a"]
    ordered = [names[i] for i in grouped(names)]
    assert ordered == ["b", "b-fp16-plan", "a", "a-fp16-x", "c", "d-fp16-plan"]
    assert marks(ordered) == ["", "↳", "", "↳", "", ""]  # d itself is not here


def test_a_filter_looks_for_all_its_words(tmp_path):
    (row,) = runs_frame([listed(tmp_path, "My run")]).to_dict("records")
    assert matches(row, "")
    assert matches(row, "complete MY")
    assert not matches(row, "my training")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ssd", ["ssd", "ssd-fp16-plan"]),
        ("ssd-fp16-plan", ["ssd", "ssd-fp16-plan"]),
        ("ssd-2", ["ssd-2"]),
        ("gpt-fp8-row-2", ["gpt", "gpt-nvfp4", "gpt-fp8-row-2"]),
        ("other", []),
    ],
)
def test_a_family_of_trainings(name, expected):
    known = ["ssd-fp16-plan", "ssd", "ssd-2", "digits", "gpt-fp8-row-2", "gpt-nvfp4", "gpt"]
    assert family(name, known) == expected
