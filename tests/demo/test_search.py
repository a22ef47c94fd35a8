"""``mpdiag search``: from a name to a plan."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.cli import app
from mpdiag.errors import ExitCode
from mpdiag.plan import PrecisionPlan
from mpdiag.reports.contents import read_contents
from mpdiag.reports.views.sensitivity import ranking
from mpdiag.runs.stored_search import MUST


def run(*words):
    return CliRunner().invoke(app, ["search", *map(str, words)])


def test_an_exhibit_from_recording_to_plan(tmp_path):
    place = tmp_path / "run"
    options = ("gallery/fourth_power", "--no-lists", "--seeds", 2, "--steps", 20, "--run", place)
    result = run(*options)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "1 of" in result.stdout
    assert "pow" in result.stdout
    assert "next:" in result.stderr
    plan = PrecisionPlan.load(place / "plan.json")
    assert [(c.module, c.op) for c in plan.fp32_operations] == [("criterion", "pow")]
    trained = json.loads((place / "search.json").read_text())
    ranked = ranking(
        read_contents(analyze(place))
    )  # the folder is a run, which the dashboard shows
    assert ranked.source == "measured"
    assert (ranked.frame["operation"].iloc[0], ranked.frame["trained"].iloc[0]) == ("pow", MUST)
    again = run(*options, "--json")  # nothing is trained any more: recording and search are kept
    document = json.loads(again.stdout)
    assert document["answer"] == "found"
    assert json.loads((place / "search.json").read_text()) == trained


def test_a_workload_by_a_plan(tmp_path):
    PrecisionPlan().save(tmp_path / "given.json")
    result = run(
        "digits", "--plan", tmp_path / "given.json", "--seeds", 2, "--steps", 4,
        "--run", tmp_path / "run", "--json",
    )  # fmt: skip
    assert result.exit_code == ExitCode.OK, result.stderr
    document = json.loads(result.stdout)
    assert document["answer"] == "none"
    assert document["reference"]["higher_is_better"] is True
    assert {c["module"] for c in document["candidates"]} >= {"stem", "classifier"}


def test_no_time_is_an_answer_too(tmp_path):
    PrecisionPlan().save(tmp_path / "given.json")
    options = (
        "gallery/mlp",
        "--plan",
        tmp_path / "given.json",
        "--budget",
        0.01,
        "--run",
        tmp_path,
    )
    result = run(*options)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "to continue" in result.stdout or "Nothing needs" in result.stdout


@pytest.mark.parametrize("name", ["nonsense", "gallery/nonsense"])
def test_an_unknown_name_is_refused_in_a_sentence(name, tmp_path):
    result = run(name, "--run", tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert "choose one of" in result.stderr
    assert "Traceback" not in result.stderr
