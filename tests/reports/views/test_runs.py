"""The list of runs: badges, order, filter."""

from __future__ import annotations

import math

import pytest

from mpdiag.plan import Verdict
from mpdiag.reports.glance import Glance, PlanGlance
from mpdiag.reports.views.runs import (
    Badge,
    badge,
    badge_colours,
    format_of,
    grouped,
    marks,
    matches,
    runs_frame,
    tones_of,
)
from mpdiag.runs.run import Listing, Run


def listing(tmp_path, name="run", **meta):
    return Listing(tmp_path / name, Run(tmp_path / name, meta), None)


def planned(need, level="expected", scale=64.0):
    return Glance(plan=PlanGlance(Verdict(level, "…"), "fp16", need, scale))


@pytest.mark.parametrize(
    ("glance", "expected"),
    [
        (Glance(), Badge("not analyzed")),
        (planned("needed"), Badge("needs scale 64", "careful")),
        (planned("advisable"), Badge("scale 64 advised", "good")),
        (planned("not needed"), Badge("needs no scale", "good")),
        (planned("not needed", "shown"), Badge("needs no scale, shown", "good")),
        (planned("needed", "cannot"), Badge("cannot train so", "bad")),
        (planned("what else"), Badge("not known")),
    ],
)
def test_the_badge_of_a_recording(tmp_path, glance, expected):
    assert badge(listing(tmp_path), glance) == expected


@pytest.mark.parametrize(
    ("glance", "compared", "words"),
    [
        (Glance(last_loss=1.0), None, "not compared"),
        (Glance(last_loss=math.inf), "equivalent", "loss not finite"),
        (Glance(stopped="8 steps in a row"), None, "stopped"),
        (Glance(last_loss=1.0), "equivalent", "equivalent to FP32"),
        (Glance(last_loss=1.0), "different", "different from FP32"),
        (Glance(last_loss=1.0), "inconclusive", "compared: inconclusive"),
    ],
)
def test_the_badge_of_a_training(tmp_path, glance, compared, words):
    run = listing(tmp_path, training={"dtype": "fp16", "level": "O1"})
    assert badge(run, glance, compared).words == words
    assert badge(run, glance, compared, live=True).words == "in progress"


def test_what_a_comparison_said_stands_beside_the_training(tmp_path):
    runs = [listing(tmp_path, "a"), listing(tmp_path, "a-fp16-plan", training={"level": "O1"})]
    glances = [Glance(compared=("a-fp16-plan", "equivalent")), Glance()]
    for before in ("", "sample/"):
        names = [before + run.folder.name for run in runs]
        frame = runs_frame(runs, ["complete"] * 2, glances, names, [False, False])
        assert list(frame["verdict"]) == ["not analyzed", "equivalent to FP32"]
        tones = tones_of(runs, glances, names, [False, False])
        words, colours = badge_colours(frame, tones)
        assert words == ["not analyzed", "equivalent to FP32"]
        assert len(set(colours)) == 2


def test_what_a_meta_json_does_not_say_is_empty(tmp_path):
    odd = listing(tmp_path, model=3, device=[], created=7, steps_seen="many", training=None)
    torn = Listing(tmp_path / "torn", None, "damaged")
    frame = runs_frame([odd, torn], ["complete", ""])
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
    (row,) = runs_frame([listing(tmp_path, "My run")], ["complete"]).to_dict("records")
    assert matches(row, "")
    assert matches(row, "complete MY")
    assert not matches(row, "my training")
